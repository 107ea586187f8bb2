"""Bring a trained student to a file that simulators and other tools execute, with proof that it is the same model.

    bundle = export.export("runs/tiny", "bundle", to="nir")        # or a loaded student; to="lava" for a Lava network
    bundle.path, bundle.report, bundle.verified
    placement = export.resource_map("bundle", context=256)         # cores of a Loihi 2, design rules checked

`api` is the way in; `quantize` lowers to integers, `nir` and `lava` write, `verify` reads back and compares,
`reference` is the deployable model in torch, `loihi` places it on cores. Nothing is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.api import Exported, export
    from export.loihi.map import ResourceMap, resource_map

__all__ = ["Exported", "ResourceMap", "export", "resource_map"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    module = "export.loihi.map" if name in ("ResourceMap", "resource_map") else "export.api"
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("export", "spikeopd", "neuro_sim"):
            raise
        from spikeopd.errors import BackendMissing, install_command

        raise BackendMissing(
            f"reading a checkpoint needs torch and transformers ({error}); "
            f"install them with: {install_command('train')}"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
