"""`import spikeopd` makes transformers' Auto classes know the student, when they are first used and not before.

transformers has no entry point for models of other packages. So the import of its table of models is watched: right
after it, the student registers itself there. Nothing heavy is imported for those who do not use the Auto classes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TABLE = "transformers.models.auto.modeling_auto"


class _Registering(Loader):
    """A module's own loader, and the registration after it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        register_student()


class _Watch(MetaPathFinder):
    """Finds nothing itself; asks the others for the one module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


def watch() -> None:
    """Register now where the table is there already, else when it comes."""
    if TABLE in sys.modules:
        register_student()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def register_student() -> None:
    with contextlib.suppress(ImportError):  # transformers without torch has no models, and then nobody misses it
        import_module("spikeopd.models.bispikclm")  # registers itself
