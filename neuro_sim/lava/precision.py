"""The float32 twin of an integer model: the same numbers, without rounding and saturation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import DECAY_BITS, EMBED_SITE, RESIDUAL_FRACTION_BITS, Layer, Site, SpikeModel
from spikeopd.contracts.topology import RESIDUAL_SITES

Array = NDArray[Any]
RESIDUAL_UNIT = 2.0**RESIDUAL_FRACTION_BITS


def float_twin(model: SpikeModel) -> SpikeModel:
    """An int8 model as a float32 one, in units in which a current is not shifted and the residual stream counts ones.

    A float32 model is returned as it is. Units change by powers of two, which float32 has exactly, so only the
    residual readout's LayerNorm sees them: its epsilon means the same in both models.

    Spikes may differ from the integer model's: the decay is not truncated and nothing saturates.
    """
    if model.precision == "float32":
        return model
    embedding, head = model.embedding, model.head
    row = embedding.row_scale / 2.0**embedding.shift  # moves from the rows' scale into the rows themselves
    return replace(
        model,
        precision="float32",
        decay=model.decay / (1 << DECAY_BITS),
        embedding=replace(
            embedding,
            table=_float(embedding.table * row[:, None]),
            row_scale=np.ones(len(row), np.float32),
            channel_gain=_float(embedding.channel_gain / RESIDUAL_UNIT),
            shift=0,
            position=_float(embedding.position / RESIDUAL_UNIT),
            project_in=None if embedding.project_in is None else _float(embedding.project_in),
        ),
        embed_site=_site(EMBED_SITE, model.embed_site),
        layers=tuple(_layer(layer) for layer in model.layers),
        head=replace(
            head,
            row_scale=head.row_scale / row,
            gamma=None if head.gamma is None else _float(head.gamma),
            project_out=None if head.project_out is None else _float(head.project_out),
        ),
    )


def _float(values: Array) -> Array:
    return values.astype(np.float32)


def _site(name: str, site: Site) -> Site:
    unit = RESIDUAL_UNIT if name in RESIDUAL_SITES else 2.0**site.shift
    return Site(_float(site.threshold / unit), _float(site.bias / unit), 0)


def _layer(layer: Layer) -> Layer:
    arrays = {name: value for name, value in vars(layer).items() if name != "sites" and value is not None}
    for weights, shift in (("w_o", "shift_o"), ("w_2", "shift_y")):
        if shift in arrays:  # a current write: its sums are residual units
            arrays[weights] = arrays[weights] * 2.0 ** arrays.pop(shift).astype(np.int64) / RESIDUAL_UNIT
    for name in ("gain_o", "gain_y", "bias_o", "bias_y"):
        if name in arrays:
            arrays[name] = arrays[name] / RESIDUAL_UNIT
    floats = {name: _float(value) for name, value in arrays.items()}
    return Layer(**floats, sites={name: _site(name, site) for name, site in layer.sites.items()})
