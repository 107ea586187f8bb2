"""What the packages exchange, each format in one place. numpy and the standard library only.

topology   the block as a table: sites, drivers, fan-outs, components; the model's sizes
model      the deployable model and the integer neuron, the definition every backend computes
bundle     the exported folder: manifest, arrays, the reader
trace      spike traces: compared, written, read
activity   counted events
run        run.json: the one validator, used by its writer and by `energy`
"""

from spikeopd.contracts.activity import APPENDIX_E_PJ, Activity
from spikeopd.contracts.bundle import load_bundle, read_manifest
from spikeopd.contracts.model import (
    COUNT_SHIFT,
    DECAY_BITS,
    LOGIT_INPUT_BITS,
    MEMBRANE_BITS,
    MEMBRANE_MAX,
    MEMBRANE_MIN,
    RESIDUAL_FRACTION_BITS,
    WEIGHT_BITS,
    WEIGHT_SHIFT,
    Array,
    Embedding,
    Head,
    Layer,
    Precision,
    Site,
    SpikeModel,
    fetched_bytes,
    head_logits,
    is_integer,
    normalise_counts,
    readout_unit,
    row_bytes,
    site_shift,
    weight_limit,
)
from spikeopd.contracts.run import Run, load_run, parse_run, write_run
from spikeopd.contracts.topology import (
    EMBED_SITE,
    LAYER_COMPONENTS,
    LAYER_SITES,
    RESIDUAL,
    Connection,
    ModelShape,
    component_drivers,
    connections,
    ordered_sites,
    parse_shape,
    projections,
)
from spikeopd.contracts.trace import (
    Difference,
    SpikeTrace,
    equal_share,
    first_difference,
    load_trace,
    save_trace,
)

__all__ = [
    "APPENDIX_E_PJ",
    "COUNT_SHIFT",
    "DECAY_BITS",
    "EMBED_SITE",
    "LAYER_COMPONENTS",
    "LAYER_SITES",
    "LOGIT_INPUT_BITS",
    "MEMBRANE_BITS",
    "MEMBRANE_MAX",
    "MEMBRANE_MIN",
    "RESIDUAL",
    "RESIDUAL_FRACTION_BITS",
    "WEIGHT_BITS",
    "WEIGHT_SHIFT",
    "Activity",
    "Array",
    "Connection",
    "Difference",
    "Embedding",
    "Head",
    "Layer",
    "ModelShape",
    "Precision",
    "Run",
    "Site",
    "SpikeModel",
    "SpikeTrace",
    "component_drivers",
    "connections",
    "equal_share",
    "fetched_bytes",
    "first_difference",
    "head_logits",
    "is_integer",
    "load_bundle",
    "load_run",
    "load_trace",
    "normalise_counts",
    "ordered_sites",
    "parse_run",
    "parse_shape",
    "projections",
    "read_manifest",
    "readout_unit",
    "row_bytes",
    "save_trace",
    "site_shift",
    "weight_limit",
    "write_run",
]
