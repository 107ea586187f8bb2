"""Machine code of the passes: made from the shipped text, kept, made again when it is damaged; numba is not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from random_models import random_model

from neuro_sim.dense import DenseDecoder
from neuro_sim.event import native
from neuro_sim.event.engine import EventDecoder

usual = pytest.mark.skipif(
    not native._family().startswith("x86_64 avx2 posix"),
    reason="the shipped text is for x86-64 with AVX2 and not Windows",
)


@usual
def test_the_shipped_text_is_of_these_sources() -> None:
    """If this fails the kernels were changed: run `python -m neuro_sim.event.native`."""
    written = native.lzma.decompress(native.SHIPPED.read_bytes()).decode().partition("\n")[0]
    if native.shipped() is None and f"LLVM {native.llvm.llvm_version_info[0]}" not in shipped_family():
        pytest.skip("another release of LLVM than the text was written with")
    assert written == native.source_digest()


def shipped_family() -> str:
    return native.lzma.decompress(native.SHIPPED.read_bytes()).decode().split("\n", 2)[1]


@usual
def test_code_is_kept_and_a_damaged_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    real = native.machine_code
    monkeypatch.setattr(native, "machine_code", lambda text: made.append(1) or real(text))
    load = native.load_passes.__wrapped__
    load()
    (file,) = tmp_path.iterdir()
    load()
    assert len(made) == 1
    file.write_bytes(file.read_bytes()[:-7])
    passes = load()
    assert len(made) == 2
    monkeypatch.setattr("neuro_sim.event.engine.load_passes", lambda: passes)
    model = random_model()
    assert np.array_equal(EventDecoder(model).step(3)[0], DenseDecoder(model).step(3)[0])


@usual
def test_decoding_needs_no_numba() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from random_models import random_model\n"
        "from neuro_sim.event import native; native.shipped() or sys.exit(3)\n"
        "from neuro_sim.event.engine import EventDecoder; EventDecoder(random_model()).step(1)\n"
        "sys.exit('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parents[3])], check=False)
    assert done.returncode in (0, 3)


@pytest.mark.slow
def test_numba_writes_the_shipped_text_again() -> None:
    """Fresh code of this machine's numba gives the same logits."""
    passes = native.Passes(native.machine_code(native.front_end()))
    model = random_model()
    decoder = EventDecoder(model)
    decoder.engine._passes = decoder.engine._team._passes = passes
    assert np.array_equal(decoder.step(3)[0], DenseDecoder(model).step(3)[0])
