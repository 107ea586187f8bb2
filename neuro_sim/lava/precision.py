"""The float32 twin of an integer model: the same numbers, without rounding and saturation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import DECAY_BITS, Layer, Site, SpikeModel

Array = NDArray[Any]


def float_twin(model: SpikeModel) -> SpikeModel:
    """An int8 model as a float32 one, in units in which a current is not shifted. A float32 model is returned as it is.

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
            channel_gain=_float(embedding.channel_gain),
            shift=0,
            position=_float(embedding.position),
            project_in=None if embedding.project_in is None else _float(embedding.project_in),
        ),
        embed_site=_site(model.embed_site),
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


def _site(site: Site) -> Site:
    unit = 2.0**site.shift
    return Site(_float(site.threshold / unit), _float(site.bias / unit), 0)


def _layer(layer: Layer) -> Layer:
    arrays = {name: _float(value) for name, value in vars(layer).items() if name != "sites" and value is not None}
    return Layer(**arrays, sites={name: _site(site) for name, site in layer.sites.items()})
