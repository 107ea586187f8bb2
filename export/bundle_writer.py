"""Write a bundle: the model file, tokenizer, report, and the manifest that says where every array lies.

Works from a `SpikeModel` alone, so that tests and tools need no checkpoint. The folder appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from export.arrays import Location, array_index
from export.nir.graph import Neuron, Profile, build_graph
from spikeopd import __version__
from spikeopd.contracts import SpikeModel
from spikeopd.contracts.bundle import MANIFEST, bundle_schema, read_manifest
from spikeopd.errors import InputError, cannot_write
from spikeopd.files import check_new_directory, new_directory, sha256, write_json

Target = Literal["nir", "lava", "arrays"]


@dataclass(frozen=True)
class BundleOptions:
    """What to write. The NIR options matter for `target="nir"` only."""

    target: Target = "nir"
    profile: Profile = "cell"
    neuron: Neuron = "exact"
    context: int = 1
    tokenizer: Path | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)  # ids of bos, eos, pad where the model has them
    generation: Mapping[str, Any] = field(default_factory=dict)  # how to sample, as generation_config.json has it
    source: Mapping[str, Any] = field(default_factory=dict)  # where the model came from


def write_bundle(model: SpikeModel, output: Path | str, options: BundleOptions | None = None) -> Path:
    """Write a bundle folder for `model`; the report is empty unless `bundle_draft` is used."""
    with bundle_draft(model, output, options or BundleOptions()) as (folder, _):
        write_json(folder / "report.json", {"schema": "spikeopd.export-report/1"})
    return Path(output)


@contextmanager
def bundle_draft(
    model: SpikeModel, output: Path | str, options: BundleOptions
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield (folder, manifest) of a bundle whose model file is written, before anyone can see it.

    The body may check it, write report.json and extend the manifest; `seal` has already made it readable. The folder
    becomes `output` when the body ends well.
    """
    output = Path(output)
    check_output(output)
    try:
        with new_directory(output) as folder:
            manifest = _write(model, folder, options)
            yield folder, manifest
            seal(folder, manifest)
            check_replaceable(output)  # hours may have passed since the first look
    except BrokenPipeError:  # the terminal went away, not the disk
        raise
    except OSError as error:
        raise cannot_write(output, "--output", error) from error


def check_output(output: Path) -> None:
    """Refuse a folder that cannot be written or must not be replaced. Quick, so that it can come before the work."""
    check_replaceable(output)
    if output.resolve() == Path.cwd():
        raise InputError(f"--output {output}: is the working folder, which cannot be replaced; name a folder in it")
    check_new_directory(output, "--output")


def check_replaceable(output: Path) -> None:
    """Only an empty folder or a bundle with nothing else in it may be replaced: all other files are the user's."""
    if not os.path.lexists(output):
        return
    try:
        names = {path.name for path in output.iterdir()}
        if not names:
            return
        own = {MANIFEST, *read_manifest(output)["files"]}
    except (InputError, OSError):
        raise InputError(f"--output {output}: exists and is not a bundle; choose another name or remove it") from None
    foreign = sorted(names - own)
    if foreign:
        more = f" and {len(foreign) - 1} more" if foreign[1:] else ""
        raise InputError(
            f"--output {output}: the bundle there would be replaced, but {foreign[0]}{more} is not part of it; "
            "move it or choose another name"
        )


def _write(model: SpikeModel, folder: Path, options: BundleOptions) -> dict[str, Any]:
    """Model file, tokenizer and a first manifest."""
    if model.shape.graded and options.target != "arrays":
        raise InputError(f"a quantised twin has no {options.target} form, its activations are counts; use arrays")
    if options.target == "nir":
        file, locations = _write_nir(model, folder, options)
        details: dict[str, Any] = {
            "nir": {"profile": options.profile, "neuron": options.neuron, "context": options.context}
        }
    else:
        from export.lava.bundle import write_arrays, write_lava

        file, locations = (write_lava if options.target == "lava" else write_arrays)(model, folder)
        details = {}
    if options.tokenizer is not None:
        shutil.copyfile(options.tokenizer, folder / "tokenizer.json")
    manifest: dict[str, Any] = {
        "schema": bundle_schema(model.shape, model.precision),
        "target": options.target,
        **details,
        "precision": model.precision,
        "shape": model.shape.to_dict(),
        "decay": int(model.decay) if model.integer else float(model.decay),
        "embedding_shift": int(model.embedding.shift),
        "epsilon": float(model.head.epsilon),
        "tokens": {name: int(value) for name, value in options.tokens.items()},
        **({"generation": dict(options.generation)} if options.generation else {}),
        "source": {"spikeopd": __version__, **options.source},
        "arrays": array_index(folder / file, locations, model),
    }
    seal(folder, manifest)
    return manifest


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Hash the files and write the manifest."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    manifest["files"] = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names
    }
    write_json(folder / MANIFEST, manifest)


def _write_nir(model: SpikeModel, folder: Path, options: BundleOptions) -> tuple[str, dict[str, Location]]:
    import nir

    built = build_graph(
        model, profile=options.profile, neuron=options.neuron, context=options.context, tokens=options.tokens
    )
    # Uncompressed: weights hardly compress, and a reader can map them and check their size before it allocates.
    nir.write(folder / "model.nir", _Uncopied(built.graph), compression=None)
    return "model.nir", built.locations


class _Uncopied:
    """What `nir.write` asks of a graph: `to_dict`. NIR's own copies every array once for each level of nesting."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def to_dict(self) -> dict[str, Any]:
        return plain_dict(self.graph)


def plain_dict(node: Any) -> dict[str, Any]:
    """`node.to_dict()` with references instead of copies."""
    values = {f.name: getattr(node, f.name) for f in fields(node) if f.name not in ("input_type", "output_type")}
    if "nodes" in values:
        values["nodes"] = {name: plain_dict(child) for name, child in node.nodes.items()}
    if type(node).__name__ == "Input":
        values["shape"] = node.input_type["input"]
    if type(node).__name__ == "Output":
        values["shape"] = node.output_type["output"]
    return {**values, "type": type(node).__name__}
