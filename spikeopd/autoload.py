"""`import spikeopd` makes transformers' Auto classes know the student, when they are first used and not before.

transformers has no entry point for models of other packages. So the imports of its tables are watched: right after
one, the student registers itself there. Nothing heavy is imported for those who do not use the Auto classes.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command begins with this module: it imports next to nothing
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# The table of configurations, which AutoConfig loads alone, and of models. When the first is loaded on the way to the
# second, the student cannot be built yet, and is registered after the second.
TABLES = {"transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"}


class _Registering:
    """A module's own loader, and the registration after it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        register_student()


class _Watch:
    """Finds nothing itself; asks the others for the tables, once each."""

    def __init__(self, tables: set[str]) -> None:
        self.tables = tables

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.tables:
            return None
        self.tables.remove(fullname)
        from importlib.util import find_spec

        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)  # type: ignore[assignment]  # what import asks of a loader
        return spec


def watch() -> None:
    """Register now where the tables are there already, else when they come."""
    missing = TABLES - sys.modules.keys()
    if missing != TABLES:
        register_student()
    if missing and not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(missing))


def register_student() -> None:
    import contextlib

    with contextlib.suppress(ImportError):  # transformers without torch has no models, and then nobody misses it
        import_module("spikeopd.models.bispikclm")  # registers itself
