"""The student's code as one file beside its weights, so that a process with torch and transformers alone can load it.

The file is the text of the package's own modules, one after the other, without their imports of each other. What it
leaves out are the compiled neurons (numba, Triton): the torch ones give the same numbers. Whoever loads it must ask
for it with `trust_remote_code=True`; this package never does.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from spikeopd import __version__
from spikeopd.errors import InputError
from spikeopd.files import write_json, write_text
from spikeopd.registry import NEURONS
from spikeopd.students import find_student, read_config

FILE = "modeling_bispikclm.py"
AUTO_MAP = {
    "AutoConfig": "BiSpikCLMConfig",
    "AutoModel": "BiSpikCLMModel",
    "AutoModelForCausalLM": "BiSpikCLMForCausalLM",
}
PLACE = "spikeopd.models"
PARTS = (
    "gradients",
    "surrogate",
    "neurons",
    "grid",
    "quantised",
    "products",
    "attention",
    "configuration",
    "projection",
    "bispikclm",
)  # read in this order
OWN = {name: target for name, target in NEURONS.items() if target.partition(":")[0].removeprefix(f"{PLACE}.") in PARTS}
# What the parts import from elsewhere in the package, where its text would not do.
INSTEAD = {
    "InputError": "InputError = ValueError",
    "short": "def short(value):\n    return str(value)[:160]",
    "NEURONS": f"NEURONS = {OWN!r}",
    "load": 'def load(target):\n    return globals()[target.partition(":")[2]]',
    "lif_cpu": "class lif_cpu:  # the compiled neurons are in the package\n    usable = staticmethod(lambda *_: False)",
    "lif_triton": "lif_triton = lif_cpu",
    "attention_cpu": "attention_cpu = lif_cpu",
    "grid_cpu": "grid_cpu = lif_cpu",
}
LEFT_OUT = ("register",)  # transformers registers what it loads from a file
HEAD = '''\
"""BiSpikCLM, a spiking language model: its code for transformers, with nothing else needed than torch.

Made by spikeopd {version} from its own modules (spikeopd/models), whose text this is; mend it there. With the package
installed, `import spikeopd` makes this file superfluous and the neurons several times faster, with the same numbers.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

'''


def add_remote_code(student: str | Path) -> Path:
    """Write the code beside a saved student and name it in its config.json; returns the file."""
    folder = find_student(student)
    config = read_config(folder)
    if config.get("neuron", "lif") not in OWN:
        raise InputError(f"student {folder}: its neuron {config['neuron']!r} is not of this package; publish its code")
    file = write_text(folder / FILE, remote_code())
    names = {auto: f"{FILE.removesuffix('.py')}.{name}" for auto, name in AUTO_MAP.items()}
    write_json(folder / "config.json", config | {"auto_map": names})
    return file


def remote_code() -> str:
    """The file's text."""
    imported: list[ast.alias] = []
    needed: dict[str, str] = {}
    bodies: list[str] = []
    defined = set[str]()
    for part in PARTS:
        module = import_module(f"{PLACE}.{part}")
        text = inspect.getsource(module)
        lines, kept = text.splitlines(), []
        for node in ast.parse(text).body[1:]:  # after what the module says of itself
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("spikeopd."):
                needed |= dict(_elsewhere(node, module))
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                home = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                imported += [ast.alias(f"{home}import {alias.name}", alias.asname) for alias in node.names]
            elif _wanted(node):
                kept.append(node)
        names = {name for node in kept for name in _names(node)}
        if twice := defined & names:
            raise AssertionError(f"{part}: {sorted(twice)} is defined in another module too; one file holds both")
        defined |= names
        bodies.append("\n\n\n".join([f"# --- {part} ---", *(_text(node, lines) for node in kept)]))
    used = set(re.findall(r"\w+", "\n".join(bodies)))
    statements = {ast.unparse(alias) for alias in imported if (alias.asname or alias.name.split()[-1]) in used}
    top = "\n".join(["from __future__ import annotations\n", "import sys", *sorted(statements)])
    return "\n\n".join([HEAD.format(version=__version__) + top, "\n".join(needed.values()), *bodies]) + "\n"


def _elsewhere(node: ast.ImportFrom, module: ModuleType) -> Iterator[tuple[str, str]]:
    """What stands for a name imported from the package: nothing if it is defined in the same file."""
    for alias in node.names:
        name, value = alias.name, getattr(module, alias.name)
        if name in INSTEAD:
            yield name, INSTEAD[name]
        elif name in PARTS:
            yield name, f"{name} = sys.modules[__name__]  # all modules are this one"
        elif node.module not in {f"{PLACE}.{part}" for part in PARTS}:
            yield from _value(name, value)


def _value(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A constant by its value, a function by its text and what it reads."""
    if isinstance(value, (int, float, str, tuple, dict, frozenset)):
        yield name, f"{name} = {value!r}"
        return
    if not inspect.isfunction(value):
        raise AssertionError(f"{name}: a {type(value).__name__} cannot be written down; say what stands INSTEAD")
    for other, used in inspect.getclosurevars(value).globals.items():
        yield from _value(other, used)
    yield name, inspect.getsource(value).strip()


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _wanted(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    called = [call.func.id] if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else []
    return not {*_names(node), *called} & set(LEFT_OUT)


def _text(node: ast.stmt, lines: list[str]) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    while lines[first - 2].startswith("#"):  # what is said of it
        first -= 1
    return "\n".join(lines[first - 1 : node.end_lineno])
