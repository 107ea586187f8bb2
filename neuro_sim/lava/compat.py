"""Import lava-nc 0.10.0 on any Python it can work on, without touching a file of it.

Two things stand in the way of a plain `import lava...`:

* On Python >= 3.11 `lava.magma.compiler.var_model` fails: it uses instances of an eq-dataclass as field defaults,
  and an eq-dataclass is unhashable, which 3.11 takes for "mutable default". While that one module is imported,
  dataclasses defined in `lava.*` keep the identity hash; afterwards `dataclasses.dataclass` is itself again.
* Lava calls `multiprocessing.set_start_method("fork")` when imported, which raises if the program has chosen a method
  before and would choose one for the whole program if not. The program's own choice is put back after the import;
  `fork_start_method` is used where Lava really starts processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from spikeopd.errors import BackendMissing

LAVA_VERSION = "0.10.0"
INSTALL_COMMANDS = (
    f"pip install --no-deps --ignore-requires-python lava-nc=={LAVA_VERSION}",
    'pip install "numpy>=1.26,<2.4" "networkx>=2.8,<4" "scipy>=1.10,<2" "scikit-learn>=1.5,<2" "asteval>=0.9.31,<2"',
)
_NUMPY_TOO_NEW = (2, 4)  # np.reshape(newshape=) is gone there, and Lava calls it


def lava_available() -> bool:
    """Whether Lava can be imported here. Imports it, so that the answer is true."""
    try:
        require_lava()
    except BackendMissing:
        return False
    return True


def require_lava() -> None:
    """Import Lava, or raise BackendMissing with the command that installs it."""
    if sys.platform == "win32":
        raise BackendMissing(
            "the Lava backend starts its processes with fork, which Windows lacks; use --backend event"
        )
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= _NUMPY_TOO_NEW:
        raise BackendMissing(
            f'Lava does not work with numpy {np.__version__}; install it with: pip install "numpy<2.4"'
        )
    if "lava.magma.runtime.runtime" in sys.modules:
        return
    try:
        with fork_start_method(choose=False), _hashable_dataclasses():
            importlib.import_module("lava.magma.compiler.var_model")
        with fork_start_method(choose=False):
            importlib.import_module("lava.magma.core.process.process")
    except ImportError as error:
        command = " && ".join(INSTALL_COMMANDS)
        raise BackendMissing(f"Lava is not installed ({error}); install it with: {command}") from error


@contextlib.contextmanager
def fork_start_method(choose: bool = True) -> Iterator[None]:
    """Within, multiprocessing forks (or, with choose=False, has no method chosen); the program's choice comes back."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork" if choose else None, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Take back the handlers within: every Lava process adds one to the root logger, every compiler one to its own."""
    loggers = [logging.getLogger(), logging.getLogger("lava.magma.compiler.compiler")]
    before = [list(logger.handlers) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers


@contextlib.contextmanager
def _hashable_dataclasses() -> Iterator[None]:
    original = dataclasses.dataclass

    def decorate(cls: Any = None, /, **options: Any) -> Any:
        if cls is None:
            return lambda real: decorate(real, **options)
        made: Any = original(cls, **options)
        if made.__module__.startswith("lava.") and made.__hash__ is None:
            made.__hash__ = object.__hash__
        return made

    dataclasses.dataclass = decorate
    try:
        yield
    finally:
        dataclasses.dataclass = original
