r"""Read an exported bundle into a `SpikeModel`. numpy only: no torch, no NIR package, no HDF5 library.

The manifest says where each array lies in the bundle's files, as a plain view: file, offset, dtype, shape, strides.
So nothing has to parse a stranger's HDF5, every claim is checked against the size of the file before a byte is
allocated, and NIR files and Lava bundles are read by the same few lines. docs/formats.md describes the fields.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from spikeopd.contracts.model import (
    COUNT_SHIFT,
    DECAY_BITS,
    MEMBRANE_MAX,
    WEIGHT_SHIFT,
    Array,
    Embedding,
    Head,
    Layer,
    Precision,
    Site,
    SpikeModel,
    is_integer,
    row_bytes,
    site_shift,
)
from spikeopd.contracts.topology import DISTANCES_LIMIT, EMBED_SITE, FORMS, SIZES, ModelShape, projections
from spikeopd.errors import ConfigError, InputError
from spikeopd.files import find_model, machine_memory, parse_json, sha256
from spikeopd.sampling import from_generation_config

Spec = tuple[str, tuple[int, ...]]  # dtype and shape of one array as `SpikeModel` holds it
Place = Callable[[ModelShape, Precision, dict[str, Array]], None]

SCHEMA = "spikeopd.bundle"
# 1: the paper's block; 2: any form of `ModelShape`, a bias at every site; 3: also int4; 4: a quantised twin, whose
# activations are counts
VERSIONS = (1, 2, 3, 4, 5)
MANIFEST = "manifest.json"
SHIPPED = Path(__file__).parents[1] / "assets" / "bundles"
MODEL_FILES = ("model.nir", "arrays.h5")
BUNDLE_FILES = (*MODEL_FILES, "graph.json", "tokenizer.json", "report.json")
NETX_FILE = re.compile(r"netx_layer\d{3}_(q|k|v|o|ffn)\.h5")
SPECIAL_TOKENS = ("bos", "eos", "pad")  # roles of the manifest's `tokens`
MANIFEST_LIMIT = 64 << 20  # bytes; a thousand layers need less
FILE_SLACK = 64 << 20  # bytes that any file may have beside what it holds of the model
SIZE_LIMIT = 1 << 24  # no dimension of a model is larger; keeps products far from overflow
STEPS_LIMIT = 1 << 10
WRITE_SHIFT_LIMIT = 16  # of a current write: the shifted sum of a row still fits 32 bits

# How a stored value becomes the model's. NIR's Threshold fires at `>`, so its file holds the float32 just below the
# threshold; a bias is added to the sum of weights or of counts, so it is stored in their units; a shift is a factor.
TRANSFORMS = ("next_above", "weight_units", "count_units", "exponent")
PAIRED = "int4"  # dtype of an entry whose file holds `pack_nibbles`
NO_BIAS = {"constant": 0}  # entry of a bias that is zero throughout and therefore not stored


def bundle_schema(shape: ModelShape, precision: Precision) -> str:
    """The lowest version that can say what this model is: older readers keep reading what they can."""
    if shape.inhibiting:
        return f"{SCHEMA}/5"
    return f"{SCHEMA}/{4 if shape.graded else 3 if precision == 'int4' else 1 if shape.paper_block else 2}"


def pack_nibbles(weights: Array) -> Array:
    """int8 [in, out] from -8 to 7 as uint8 [in, ceil(out / 2)]: two columns a byte, the even one in the low half."""
    low, high = weights[:, ::2].astype(np.uint8) & 15, weights[:, 1::2].astype(np.uint8) & 15
    low[:, : high.shape[1]] |= high << 4
    return low


def unpack_nibbles(packed: Array, columns: int) -> Array:
    """The inverse of `pack_nibbles`."""
    weights = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    weights[:, ::2], weights[:, 1::2] = (packed << 4).view(np.int8) >> 4, packed.view(np.int8) >> 4
    return np.ascontiguousarray(weights[:, :columns])


def layer_writes(shape: ModelShape, precision: Precision) -> dict[str, str]:
    """The arrays by which a sublayer adds to the residual stream, with their dtypes."""
    word = "int32" if is_integer(precision) else "float32"
    if shape.residual_write == "spike":
        return {"gain_o": word, "gain_y": word}
    shifts = {"shift_o": "uint8", "shift_y": "uint8"} if is_integer(precision) else {}
    return {"bias_o": word, "bias_y": word} | shifts


def biased_sites(shape: ModelShape) -> tuple[str, ...]:
    """Sites of a layer whose bias is stored: those behind a projection in schema 1, all in schema 2."""
    if shape.paper_block:
        return tuple(connection.target for connection in projections(shape))
    return tuple(site for site in shape.layer_sites if site != "a" or shape.distances)


def array_specs(shape: ModelShape, precision: Precision) -> dict[str, Spec]:
    """Every array of a deployable model by name, with its dtype and shape."""
    d, ffn, heads, width = shape.hidden_size, shape.ffn_dim, shape.num_attention_heads, shape.word_embed_proj_dim
    vocab, positions = shape.vocab_size, shape.max_position_embeddings
    narrow, half, word = ("int8", "int16", "int32") if is_integer(precision) else ("float32", "float32", "float32")
    specs: dict[str, Spec] = {
        "embedding.table": (narrow, (vocab, width)),
        "embedding.row_scale": (word, (vocab,)),
        "embedding.channel_gain": (word, (d,)),
        "embedding.position": (half, (positions, d)),
        "embed.threshold": (word, (d,)),
        "head.row_scale": ("float64", (vocab,)),
        "head.bias": ("float64", (vocab,)),
    }
    if shape.factorised:
        specs["embedding.project_in"] = (narrow, (width, d))
        specs["head.project_out"] = (narrow, (d, width))
    if shape.factorised or shape.readout == "residual":
        specs["head.out_scale"] = ("float64", (width,))
        specs["head.out_bias"] = ("float64", (width,))
    else:
        specs["head.gamma"] = (half, (d,))
    if not shape.paper_block:
        specs["embed.bias"] = (word, (d,))
    for index in range(shape.num_hidden_layers):
        for weight in projections(shape):
            assert weight.fan_in is not None and weight.fan_out is not None
            specs[f"layers.{index}.{weight.name}"] = (narrow, (weight.fan_in, weight.fan_out))
        for name, dtype in layer_writes(shape, precision).items():
            specs[f"layers.{index}.{name}"] = (dtype, (d,))
        if shape.inhibiting:
            specs[f"layers.{index}.inhibition"] = (word, (d,))
        for site in shape.layer_sites:
            count = heads if site == "a" else ffn if site == "f" else d
            specs[f"layers.{index}.{site}.threshold"] = (word, (count,))
            if site in biased_sites(shape):
                size = (heads, shape.distances) if site == "a" else (count,)
                specs[f"layers.{index}.{site}.bias"] = (word, size)
    return specs


def layer_arrays(shape: ModelShape, precision: Precision) -> tuple[str, ...]:
    """Names of a layer's arrays other than those of its sites."""
    inhibition = ("inhibition",) if shape.inhibiting else ()
    return (*(weight.name for weight in projections(shape)), *layer_writes(shape, precision), *inhibition)


def model_arrays(model: SpikeModel) -> dict[str, Array]:
    """The arrays of a model under the names of `array_specs`; the inverse of `assemble`."""
    embedding, head = model.embedding, model.head
    named: dict[str, Array | None] = {
        "embedding.table": embedding.table,
        "embedding.row_scale": embedding.row_scale,
        "embedding.channel_gain": embedding.channel_gain,
        "embedding.position": embedding.position,
        "embedding.project_in": embedding.project_in,
        "embed.threshold": model.embed_site.threshold,
        "embed.bias": model.embed_site.bias,
        "head.row_scale": head.row_scale,
        "head.bias": head.bias,
        "head.gamma": head.gamma,
        "head.project_out": head.project_out,
        "head.out_scale": head.out_scale,
        "head.out_bias": head.out_bias,
    }
    for index, layer in enumerate(model.layers):
        for name in layer_arrays(model.shape, model.precision):
            named[f"layers.{index}.{name}"] = getattr(layer, name)
        for site, values in layer.sites.items():
            named[f"layers.{index}.{site}.threshold"] = values.threshold
            named[f"layers.{index}.{site}.bias"] = values.bias
    specs = array_specs(model.shape, model.precision)
    return {name: np.asarray(named[name], dtype=dtype).reshape(size) for name, (dtype, size) in specs.items()}


def assemble(
    shape: ModelShape,
    precision: Precision,
    decay: float,
    embedding_shift: int,
    epsilon: float,
    arrays: Mapping[str, Array],
) -> SpikeModel:
    """Arrays under the names of `array_specs` to the model."""

    def site(prefix: str, name: str) -> Site:
        threshold = arrays[f"{prefix}.threshold"]
        bias = arrays.get(f"{prefix}.bias", np.zeros_like(threshold))
        return Site(threshold, bias, site_shift(name, precision))

    def layer(index: int) -> Layer:
        values = {name: arrays[f"layers.{index}.{name}"] for name in layer_arrays(shape, precision)}
        sites = {name: site(f"layers.{index}.{name}", name) for name in shape.layer_sites}
        return Layer(**values, sites=sites)

    return SpikeModel(
        shape=shape,
        precision=precision,
        decay=decay,
        embedding=Embedding(
            table=arrays["embedding.table"],
            row_scale=arrays["embedding.row_scale"],
            channel_gain=arrays["embedding.channel_gain"],
            shift=embedding_shift,
            position=arrays["embedding.position"],
            project_in=arrays.get("embedding.project_in"),
        ),
        embed_site=site(EMBED_SITE, EMBED_SITE),
        layers=tuple(layer(index) for index in range(shape.num_hidden_layers)),
        head=Head(
            row_scale=arrays["head.row_scale"],
            bias=arrays["head.bias"],
            epsilon=epsilon,
            gamma=arrays.get("head.gamma"),
            project_out=arrays.get("head.project_out"),
            out_scale=arrays.get("head.out_scale"),
            out_bias=arrays.get("head.out_bias"),
        ),
    )


# --- manifest --------------------------------------------------------------------------------------------------------


def shipped_bundles() -> dict[str, Path]:
    """Bundles that come with the package, by name."""
    found = SHIPPED.iterdir() if SHIPPED.is_dir() else ()
    return {folder.name: folder for folder in sorted(found) if (folder / MANIFEST).is_file()}


def bundle_folder(path: Path | str) -> Path:
    """The folder of a bundle: the path itself, or a shipped bundle's where no such path exists but the name does."""
    return Path(path) if os.path.lexists(path) else shipped_bundles().get(str(path), Path(path))


def read_manifest(path: Path | str) -> dict[str, Any]:
    """The checked manifest of a bundle folder. Array entries are checked by `load_bundle`, which needs the files."""
    folder = bundle_folder(path)
    if not folder.is_dir():
        shipped = f" Shipped: {', '.join(shipped_bundles())}." if shipped_bundles() else ""
        raise InputError(
            f"bundle {folder}: no such folder; make one with `spikeopd-export CHECKPOINT --output {folder}`.{shipped}"
        )
    file = folder / MANIFEST
    if not file.exists() and find_model(folder) is not None:
        raise InputError(
            f"bundle {folder}: a checkpoint, not a bundle; export it first: spikeopd-export {folder} --output BUNDLE"
        )
    size = _regular_size(file)
    if size > MANIFEST_LIMIT:
        raise InputError(f"{file}: {size} bytes is too large for a manifest")
    try:
        manifest = parse_json(file.read_bytes().decode("utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON ({_short(error)}); export the bundle again") from None
    if not isinstance(manifest, dict):
        raise _wrong(file, "manifest", "a JSON object", manifest)
    version = _check_schema(file, manifest.get("schema"))
    known = ("int8", "int4", "float32") if version >= 3 else ("int8", "float32")
    if manifest.get("precision") not in known:
        raise _wrong(file, "precision", " or ".join(map(repr, known)), manifest.get("precision"))
    _check_shape(file, manifest.get("shape"), version)
    _check_numbers(file, manifest)
    _check_tokens(file, manifest.get("tokens", {}), manifest["shape"]["vocab_size"])
    _check_generation(file, manifest.get("generation", {}))
    for name in ("files", "arrays"):
        if not isinstance(manifest.get(name), dict):
            raise _wrong(file, name, "an object", manifest.get(name))
    for name, entry in manifest["files"].items():
        if name not in BUNDLE_FILES and not NETX_FILE.fullmatch(name):
            raise _wrong(file, "files", f"names among {', '.join(BUNDLE_FILES)}", name)
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise _wrong(file, f"files.{name}.sha256", "64 hexadecimal digits", digest)
    return manifest


def manifest_shape(manifest: Mapping[str, Any]) -> ModelShape:
    """The model shape of a manifest that `read_manifest` returned."""
    known = (*SIZES, *FORMS, "distances")
    return ModelShape(**{name: manifest["shape"][name] for name in known if name in manifest["shape"]})


def _check_schema(file: Path, schema: Any) -> int:
    match = re.fullmatch(rf"{re.escape(SCHEMA)}/(\d{{1,9}})", schema) if isinstance(schema, str) else None
    if match is None:
        raise _wrong(file, "schema", f"'{SCHEMA}/{VERSIONS[-1]}'", schema)
    version = int(match[1])
    if version not in VERSIONS:
        raise InputError(
            f"{file}: field 'schema' is '{schema}', this version reads up to '{SCHEMA}/{VERSIONS[-1]}'; update spikeopd"
        )
    return version


def _check_shape(file: Path, shape: Any, version: int) -> None:
    if not isinstance(shape, dict):
        raise _wrong(file, "shape", "an object", shape)
    for name in SIZES:
        limit = STEPS_LIMIT if name == "num_steps" else SIZE_LIMIT
        value = shape.get(name)
        if type(value) is not int or not 1 <= value <= limit:
            raise _wrong(file, f"shape.{name}", f"an integer from 1 to {limit}", value)
    if shape["hidden_size"] % shape["num_attention_heads"]:
        raise _wrong(file, "shape.num_attention_heads", "a divisor of hidden_size", shape["num_attention_heads"])
    for name, choices in FORMS.items():
        allowed = choices[:1] if version == 1 else choices
        if name == "neuron":
            allowed = choices[1:] if version == 4 else choices[:1]
        if name == "attention":
            allowed = choices if version == 5 else choices[:1]
        if shape.get(name, choices[0]) not in allowed:
            raise _wrong(file, f"shape.{name}", " or ".join(map(repr, allowed)), shape[name])
    distances = shape.get("distances", 0)
    most = 0 if version == 1 else DISTANCES_LIMIT
    if type(distances) is not int or not 0 <= distances <= most:
        raise _wrong(file, "shape.distances", f"an integer from 0 to {most}", distances)


def _check_numbers(file: Path, manifest: Mapping[str, Any]) -> None:
    decay, epsilon, shift = manifest.get("decay"), manifest.get("epsilon"), manifest.get("embedding_shift")
    if is_integer(manifest["precision"]):
        if type(decay) is not int or not 0 <= decay <= 1 << DECAY_BITS:
            raise _wrong(file, "decay", f"an integer from 0 to {1 << DECAY_BITS}", decay)
        if type(shift) is not int or not 0 <= shift <= 62:
            raise _wrong(file, "embedding_shift", "an integer from 0 to 62", shift)
    else:
        if type(decay) not in (int, float) or not 0 <= decay <= 1:  # type: ignore[operator]
            raise _wrong(file, "decay", "a number from 0 to 1", decay)
        if type(shift) is not int or shift != 0:
            raise _wrong(file, "embedding_shift", "0 in float32", shift)
    if type(epsilon) is not float or not 0 < epsilon < 1:
        raise _wrong(file, "epsilon", "a number between 0 and 1", epsilon)


def _check_generation(file: Path, generation: Any) -> None:
    """How the model's makers would sample from it: numbers of a generation_config.json."""
    if not isinstance(generation, dict):
        raise _wrong(file, "generation", "an object", generation)
    try:
        from_generation_config(generation)
    except (ConfigError, ValueError, OverflowError) as error:  # NaN, infinity, more digits than a float has
        raise InputError(f"{file}: field 'generation': {_short(error)}") from None


def _check_tokens(file: Path, tokens: Any, vocabulary: int) -> None:
    """A bundle without special tokens is one for which the caller says where a text begins and ends."""
    if not isinstance(tokens, dict):
        raise _wrong(file, "tokens", "an object", tokens)
    for role in SPECIAL_TOKENS:
        if role in tokens and (type(tokens[role]) is not int or not 0 <= tokens[role] < vocabulary):
            raise _wrong(file, f"tokens.{role}", f"a token id from 0 to {vocabulary - 1}", tokens[role])


# --- arrays ----------------------------------------------------------------------------------------------------------


def load_bundle(path: Path | str, *, check_hashes: bool = True, place: Place | None = None) -> SpikeModel:
    """Read a bundle of either profile. Anything wrong with it is an `InputError` that names the field.

    place: moves arrays to where a backend wants them, entry by entry and before anybody else sees them, so that large
    weights are never in memory twice.
    """
    folder = bundle_folder(path)
    manifest = read_manifest(folder)
    shape, precision = manifest_shape(manifest), manifest["precision"]
    sizes = _check_files(folder, manifest["files"])
    entries = manifest["arrays"]
    # Count before the names are spelt out: a claimed million layers must not cost a million strings.
    if shape.num_hidden_layers > len(entries):
        raise _wrong(
            folder / MANIFEST, "shape.num_hidden_layers", "layers that `arrays` lists", shape.num_hidden_layers
        )
    specs = array_specs(shape, precision)
    absent = {name for name in specs if name.endswith(".bias") and name != "head.bias" and entries.get(name) == NO_BIAS}
    views = {
        name: _check_entry(folder, name, entries.get(name), spec, sizes, precision)
        for name, spec in specs.items()
        if name not in absent
    }
    total = sum(_bytes(view) for view in views.values())
    if total > sum(sizes.values()):
        raise InputError(
            f"{folder / MANIFEST}: field 'arrays' claims {total} bytes, the files hold {sum(sizes.values())}"
        )
    _check_effort(folder, total, manifest["files"])
    if check_hashes:
        _check_hashes(folder, manifest["files"])
    with ExitStack() as stack:
        maps = {name: _map(stack, folder / name) for name in {view["file"] for view in views.values()}}
        arrays = {name: _read(folder, name, view, specs[name], maps, precision) for name, view in views.items()}
    if place is not None:
        place(shape, precision, arrays)
    return assemble(shape, precision, manifest["decay"], manifest["embedding_shift"], manifest["epsilon"], arrays)


def _check_files(folder: Path, files: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the model's files, after a look at all of them."""
    sizes = {}
    for name, entry in files.items():
        size = _regular_size(folder / name)
        if entry.get("bytes") != size:
            raise InputError(
                f"{folder / name}: {size} bytes, but the manifest says {_short(repr(entry.get('bytes')))}; "
                "the file is truncated or was changed"
            )
        if name in MODEL_FILES:
            sizes[name] = size
    return sizes


def _check_effort(folder: Path, total: int, files: Mapping[str, Any]) -> None:
    """Refuse, before anything is read, what this machine cannot hold, and files of holes that would take hours."""
    if total > (memory := machine_memory()):
        raise InputError(f"{folder}: the model takes {total} bytes, this machine has {memory} of memory")
    for name, entry in files.items():
        if entry["bytes"] > FILE_SLACK + 64 * total:
            raise InputError(f"{folder / name}: {entry['bytes']} bytes, and the model's arrays take {total} of them")


def _check_hashes(folder: Path, files: Mapping[str, Any]) -> None:
    for name, entry in files.items():
        if sha256(folder / name) != entry["sha256"]:
            raise InputError(f"{folder / name}: sha256 differs from the manifest; the file is damaged or was changed")


def _check_entry(
    folder: Path, name: str, entry: Any, spec: Spec, sizes: Mapping[str, int], precision: Precision
) -> dict[str, Any]:
    """Check one view against the model's spec and the file's size; nothing is allocated here.

    Weights of 4 bits may be stored in pairs (dtype int4, rows of whole bytes): the view is then one of bytes.
    """
    file, where = folder / MANIFEST, f"arrays.{name}"
    if not isinstance(entry, dict):
        raise InputError(f"{file}: field '{where}' is missing; the model needs this array")
    if not isinstance(entry.get("file"), str) or entry["file"] not in sizes:
        raise _wrong(file, f"{where}.file", "a model file of this bundle", entry.get("file"))
    transform = entry.get("transform", "")
    if transform not in ("", *TRANSFORMS):
        raise _wrong(file, f"{where}.transform", f"one of {', '.join(TRANSFORMS)}", transform)
    dtype = "float32" if transform else spec[0]
    paired = precision == "int4" and not transform and entry.get("dtype") == PAIRED and is_weight(name)
    if entry.get("dtype") != dtype and not paired:
        raise _wrong(file, f"{where}.dtype", f"'{dtype}'", entry.get("dtype"))
    if entry.get("shape") != list(spec[1]) or any(type(n) is not int for n in entry["shape"]):
        raise _wrong(file, f"{where}.shape", str(list(spec[1])), entry.get("shape"))
    stored = (spec[1][0], row_bytes(spec[1][1], "int4")) if paired else spec[1]
    dtype = "uint8" if paired else dtype
    item, limit = np.dtype(dtype).itemsize, sizes[entry["file"]]
    strides = entry.get("strides", _c_strides(stored, item))
    if not _is_counts(strides) or len(strides) != len(stored):
        raise _wrong(file, f"{where}.strides", f"{len(stored)} byte counts", strides)
    offset = entry.get("offset")
    if not _is_counts([offset]):
        raise _wrong(file, f"{where}.offset", "a byte count", offset)
    end = offset + sum((n - 1) * step for n, step in zip(stored, strides, strict=True)) + item
    if end > limit or math.prod(stored) * item > limit:
        raise InputError(f"{file}: field '{where}' reaches byte {end} of {entry['file']}, which has {limit}")
    return {**entry, "shape": stored, "strides": strides, "transform": transform, "dtype": dtype, "paired": paired}


def is_weight(name: str) -> bool:
    """Whether an array of `array_specs` is a projection's weights."""
    return name.startswith("layers.") and name.rpartition(".")[2].startswith("w_")


def _read(
    folder: Path, name: str, view: Mapping[str, Any], spec: Spec, maps: Mapping[str, mmap.mmap], precision: Precision
) -> Array:
    stored = np.ndarray(
        view["shape"], np.dtype(view["dtype"]).newbyteorder("<"), maps[view["file"]], view["offset"], view["strides"]
    )
    values = np.array(stored, dtype=view["dtype"], order="C")
    del stored  # an error below must not keep the file mapped
    where = f"{folder / MANIFEST}: field 'arrays.{name}'"
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise InputError(f"{where} holds values that are not finite; export the bundle again")
    if view["paired"]:
        values = unpack_nibbles(values, spec[1][1])
    if view["transform"]:
        values = _transform(values, view["transform"], precision)
    if values.dtype.kind == "f" and spec[0] in ("int32", "uint8"):
        if (np.abs(values) > np.float32(1 << 30)).any() or (values != np.rint(values)).any():
            raise InputError(f"{where} holds values that are not integers of 32 bits")
        values = values.astype(np.int32)
    problem = _meaningless(name, values, precision)
    if problem:
        raise InputError(f"{where} holds {problem}; export the bundle again")
    return values.astype(spec[0], copy=False)


def _meaningless(name: str, values: Array, precision: Precision) -> str:
    """What is wrong with values that no exporter writes; backends may rely on these ranges. Empty if nothing is."""
    part = name.rpartition(".")[2]
    if part == "threshold" and (values <= 0).any():
        return "thresholds that are not positive"
    integer = is_integer(precision)
    if integer and part == "threshold" and (values > MEMBRANE_MAX).any():
        return "thresholds beyond the 24-bit membrane"
    if part in ("shift_o", "shift_y") and ((values < 0) | (values > WRITE_SHIFT_LIMIT)).any():
        return f"shifts outside 0 to {WRITE_SHIFT_LIMIT}"
    membrane = part in ("bias", "gain_o", "gain_y", "bias_o", "bias_y") and not name.startswith("head.")
    if integer and membrane and (np.abs(values.astype(np.int64)) > MEMBRANE_MAX).any():
        return "values beyond the 24-bit membrane"
    if precision == "int4" and is_weight(name) and ((values < -8) | (values > 7)).any():
        return "weights of more than 4 bits"
    return ""


def _transform(values: Array, transform: str, precision: Precision) -> Array:
    if transform in ("weight_units", "count_units"):
        shift = WEIGHT_SHIFT if transform == "weight_units" else COUNT_SHIFT
        return np.asarray(values * np.float32(1 << shift if is_integer(precision) else 1))
    if transform == "exponent":  # the model's k, stored as 2**k
        mantissa, exponent = np.frexp(values)
        return np.where(mantissa == 0.5, exponent - 1, -1).astype(np.float32)
    # The float32 above the stored one; for integers, whose neighbours are further apart, the next integer.
    return np.ceil(values) if is_integer(precision) else np.nextafter(values, np.float32(np.inf))


def _map(stack: ExitStack, path: Path) -> mmap.mmap:
    with open(path, "rb") as handle:
        return stack.enter_context(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))


def _bytes(view: Mapping[str, Any]) -> int:
    return int(math.prod(view["shape"]) * np.dtype(view["dtype"]).itemsize)


def _c_strides(shape: tuple[int, ...], item: int) -> list[int]:
    return [item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _is_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _regular_size(path: Path) -> int:
    """Size of a regular file; a pipe or a device would block or never end."""
    try:
        info = path.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({_short(error)}); the bundle is incomplete") from None
    if not stat.S_ISREG(info.st_mode):
        raise InputError(f"{path}: not a regular file")
    return info.st_size


def _wrong(file: Path, field: str, expected: str, value: Any) -> InputError:
    return InputError(f"{file}: field '{field}' should be {expected}, found {_short(repr(value))}")


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
