"""Bring a trained student to a file that simulators and other tools execute, with proof that it is the same model.

    bundle = export.export("runs/tiny", "bundle", to="nir")        # or a loaded student; to="lava" for a Lava network
    bundle.path, bundle.report, bundle.verified
    placement = export.resource_map("bundle", context=256)         # cores of a Loihi 2, design rules checked
    network = export.export_network("bundle", "network")           # plain neurons and synapses for SANA-FE's Loihi

`api` is the way in; `quantize` lowers to integers, `nir` and `lava` write, `verify` reads back and compares,
`reference` is the deployable model in torch, `loihi` places it on cores, `sanafe` maps it to plain neurons. Nothing is
imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.api import Exported, export
    from export.loihi.map import ResourceMap, resource_map
    from export.sanafe import ExportedNetwork, export_network

_HOMES = {
    "Exported": "api", "export": "api", "ResourceMap": "loihi.map", "resource_map": "loihi.map",
    "ExportedNetwork": "sanafe", "export_network": "sanafe",
}  # fmt: skip
__all__ = ["Exported", "ExportedNetwork", "ResourceMap", "export", "export_network", "resource_map"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"export.{_HOMES[name]}"), name)
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
