"""The compiled passes as machine code: numba writes LLVM's language once, every machine makes its own code from that.

    kernels.py, kernel_*.py, *intrinsics.py  --numba-->  kernels.ll.xz (shipped)  --LLVM-->  machine code (kept)

The first start on a machine optimises the shipped file for its CPU and keeps the result; later starts load that.
Neither needs numba. The file holds a digest of the sources it was made from: once they change it is passed over, and
numba does its part again at the next start. `python -m neuro_sim.event.native` writes the file anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import lzma
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm
from numpy.typing import NDArray

from spikeopd.errors import say
from spikeopd.files import write_bytes

Array = NDArray[Any]
HERE = Path(__file__).parent
SHIPPED = HERE / "kernels.ll.xz"
SOURCES = (
    "constants.py",
    "records.py",
    "vector_ir.py",
    "row_intrinsics.py",
    "intrinsics.py",
    "kernel_base.py",
    "kernel_head.py",
    "kernels.py",
)
ENTRY = "spikeopd_event"  # kernels.enter
ARGUMENTS = 8
OPTIMISATION = 3


class Passes:
    """kernels.enter, called by address. The code lives as long as this object; calls let other threads run."""

    def __init__(self, code: bytes) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        # numba's own convention: where the result goes, where an exception would go, then the arguments.
        kinds = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * ARGUMENTS
        self._enter = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(self._engine.get_function_address(ENTRY))

    def _call(self, *arguments: int) -> None:
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        given = arguments + (0,) * (ARGUMENTS - len(arguments))
        if self._enter(ctypes.addressof(result), ctypes.addressof(error), *given):
            raise RuntimeError("the event engine's compiled code failed")

    def decode_block(self, plan: int, work: int, given: int, thread: int, threads: int) -> None:
        """kernels.run_block of the records at these addresses."""
        self._call(0, plan, work, given, thread, threads)

    def project_row(self, weights: Array, columns: int, rows: Array, factors: Array, sums: Array, wide: Array) -> None:
        """wide [columns] = factors @ weights[rows]; rows is padded, sums is scratch."""
        places = (array.ctypes.data for array in (rows, factors))
        ends = (array.ctypes.data for array in (sums, wide))
        self._call(1, weights.ctypes.data, columns, *places, factors.size, *ends)


@cache
def load_passes() -> Passes:
    """The passes for this machine; made and kept if they are not there yet."""
    name = f"event-{_digest(source_digest(), llvmlite.__version__, *_cpu())[:32]}.o"
    folders = list(_folders())
    for folder in folders:
        with suppress(OSError):
            kept = (folder / name).read_bytes()
            if hashlib.sha256(kept[32:]).digest() == kept[:32]:  # not cut short
                return Passes(kept[32:])
    code = machine_code(shipped() or front_end())
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name, hashlib.sha256(code).digest() + code)
            break
    return Passes(code)


def _folders() -> Iterator[Path]:
    """Where numba would keep its own: where the user says, beside the source, in the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen)
        return
    yield HERE / "__pycache__"
    with suppress(RuntimeError):  # no home
        yield Path.home() / ".cache" / "spikeopd"


# --- LLVM: from its language to machine code -------------------------------------------------------------------------


@cache
def _cpu() -> tuple[str, str, str]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), _features().flatten()


def _features() -> Any:
    try:
        return llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this system
        return llvm.FeatureMap()


def _machine() -> Any:
    triple, cpu, features = _cpu()
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=OPTIMISATION, jit=True)


def machine_code(text: str) -> bytes:
    """Optimise a module for this CPU and compile it."""
    machine = _machine()
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=OPTIMISATION)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


# --- numba: from Python to LLVM's language ---------------------------------------------------------------------------


def source_digest() -> str:
    return _digest(*((HERE / name).read_text(encoding="utf-8") for name in SOURCES), _family())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _family() -> str:
    """What the text depends on beside the sources: the release of LLVM, whose language changes, and what
    `row_intrinsics.has_multiply_add` and `kernel_base.yield_cpu` ask."""
    x86 = _cpu()[0].startswith("x86_64") and bool(_features().get("avx2"))
    system = "windows" if sys.platform == "win32" else "posix"
    return f"{'x86_64 avx2' if x86 else 'generic'} {system} LLVM {llvm.llvm_version_info[0]}"


def shipped() -> str | None:
    """The text that came with the package, if it was made from these very sources for this family of CPUs."""
    try:
        digest, _, text = (
            lzma.decompress(SHIPPED.read_bytes()).decode().partition("\n")
        )  # the text begins with a remark
    except (OSError, lzma.LZMAError, UnicodeDecodeError):
        return None
    return text if digest == source_digest() else None


def front_end() -> str:
    """What numba makes of `kernels.enter`: all functions in one module of LLVM's language, not optimised."""
    with _without_back_end():
        from neuro_sim.event.kernels import enter

        (compiled,) = enter.overloads.values()
        compiled.library.finalize()  # links what it calls
    text: str = compiled.library.get_llvm_str()
    lines = text.replace(compiled.fndesc.llvm_func_name, ENTRY).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("target ", "source_filename", "; ModuleID"))) + "\n"


@contextmanager
def _without_back_end() -> Iterator[None]:
    """numba types, lowers and links, but optimises nothing and makes no machine code: LLVM does that once, for all."""
    from numba.core import codegen, cpu
    from numba.core.compiler_lock import global_compiler_lock

    def nothing(*_: Any) -> None:
        return None

    def no_entry(*_: Any) -> Any:
        return [].append  # numba keys functions by a builtin, so each needs one of its own

    replaced = [
        (codegen.JITCodeLibrary, "_optimize_final_module", nothing),
        (codegen.JITCodeLibrary, "_finalize_specific", nothing),
        (codegen.JITCPUCodegen, "_add_module", nothing),
        (cpu.CPUContext, "get_executable", no_entry),
    ]
    with global_compiler_lock:
        before = [getattr(owner, name) for owner, name, _ in replaced]
        for owner, name, other in replaced:
            setattr(owner, name, other)
        try:
            yield
        finally:
            for (owner, name, _), old in zip(replaced, before, strict=True):
                setattr(owner, name, old)


def main() -> None:
    """Write the shipped file anew."""
    packed = lzma.compress(f"{source_digest()}\n; {_family()}\n{front_end()}".encode(), preset=9 | lzma.PRESET_EXTREME)
    write_bytes(SHIPPED, packed)
    say(f"{SHIPPED}: {len(packed)} bytes for {_family()}")


if __name__ == "__main__":
    main()
