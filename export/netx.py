"""lava-dl netx files for the projection + neuron chains of a model, as close as that format comes, and what it loses.

A netx file is a sequence of dense blocks of Lava's stock LIF. That neuron has one threshold per block, resets to zero
and fires at `>`; so the per-neuron scales are folded back into the weights, which rounds them again, and the reset is
another one. Attention, the residual stream and the K/V cache have no netx form. Nothing here is used to run the model:
the files are for tools that read netx, and the report lists every loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import DECAY_BITS, RESIDUAL, WEIGHT_SHIFT, ModelShape, Site, SpikeModel, projections

Array = NDArray[Any]

THRESHOLD_MAX = (1 << 17) - 1  # lava.proc.lif: vth is an unsigned 17-bit integer, shifted left by 6
BIAS_LIMIT = 1 << 12  # bias_mant is signed 13 bit; netx sets bias_exp = 6
CANNOT = (
    "subtractive reset delayed by one step: netx's LIF resets to zero at once, so spikes after a neuron's first differ",
    "one threshold per neuron: netx has one per block, so weights were rescaled and rounded again",
    "attention, K/V cache, residual stream, embedding and head",
)
CURRENT_WRITE = (
    "w_o and w_2: they add to the residual stream without a neuron, so there is no o chain and the ffn chain ends at f"
)
FFN = ("w_1", "w_2")


def spiking_weights(shape: ModelShape) -> dict[str, str]:
    """Weight matrices that end in neurons, with their sites."""
    return {connection.name: connection.target for connection in projections(shape) if connection.target != RESIDUAL}


def chains(shape: ModelShape) -> dict[str, list[str]]:
    """Stacks of weights with nothing but neurons between and behind them: q, k, v, o (where it has neurons), ffn."""
    named: dict[str, list[str]] = {}
    for weight in spiking_weights(shape):
        named.setdefault("ffn" if weight in FFN else weight.removeprefix("w_"), []).append(weight)
    return named


def write_netx(model: SpikeModel, folder: Path) -> dict[str, Any]:
    """Write netx_layerNNN_CHAIN.h5 for every chain; return the report's section."""
    files, sites = {}, spiking_weights(model.shape)
    for index, layer in enumerate(model.layers):
        for chain, weights in chains(model.shape).items():
            name = f"netx_layer{index:03d}_{chain}.h5"
            with h5py.File(folder / name, "w") as file:
                losses = [
                    _write_block(
                        file.create_group(f"layer/{place}"), getattr(layer, weight), layer.sites[sites[weight]], model
                    )
                    for place, weight in enumerate(weights)
                ]
            files[name] = {
                "weights": weights,
                "relative_weight_error": max(loss[0] for loss in losses),
                "clipped_biases": sum(loss[1] for loss in losses),
            }
    left_out = [] if model.shape.residual_write == "spike" else [CURRENT_WRITE]
    return {"files": files, "cannot_express": [*CANNOT, *left_out]}


def common_threshold(weight: Array, site: Site) -> tuple[Array, Array, int]:
    """(weights [out, in] int8, bias in units of 64, vth in units of 64) with one threshold for all neurons.

    The neuron with the smallest threshold relative to its largest weight sets the unit, so that nothing overflows.
    """
    target = min(int(site.threshold.min()) >> WEIGHT_SHIFT, THRESHOLD_MAX)
    target = max(target, 1)
    factor = (target << WEIGHT_SHIFT) / site.threshold.astype(np.float64)
    rescaled = np.rint(weight.T * factor[:, None]).astype(np.int8)
    bias = np.rint(site.bias * factor / (1 << WEIGHT_SHIFT))
    return rescaled, np.clip(bias, -BIAS_LIMIT, BIAS_LIMIT - 1).astype(np.int32), target


def _write_block(group: h5py.Group, weight: Array, site: Site, model: SpikeModel) -> tuple[float, int]:
    fan_in, fan_out = weight.shape
    rescaled, bias, threshold = common_threshold(weight, site)
    group.create_dataset("type", (1,), "S10", [b"dense"])
    group.create_dataset("shape", data=np.array([fan_out, 1, 1]))
    group.create_dataset("inFeatures", data=fan_in)
    group.create_dataset("outFeatures", data=fan_out)
    group.create_dataset("weight", data=rescaled)
    if site.bias.any():
        group.create_dataset("bias", data=bias)
    neuron = {
        "iDecay": 1 << DECAY_BITS,  # no synaptic current beyond its own step
        "vDecay": (1 << DECAY_BITS) - int(model.decay),
        "vThMant": threshold,
        "refDelay": 1,
        "gradedSpike": 0,
    }
    group.create_dataset("neuron/type", (1,), "S10", [b"LOIHI"])
    for key, value in neuron.items():
        group.create_dataset(f"neuron/{key}", data=value)
    factor = (threshold << WEIGHT_SHIFT) / site.threshold.astype(np.float64)
    restored = rescaled / factor[:, None]
    norm = float(np.linalg.norm(weight.astype(np.float64)))
    error = float(np.linalg.norm(restored - weight.T)) / norm if norm else 0.0
    wanted = np.rint(site.bias * factor / (1 << WEIGHT_SHIFT))
    return error, int((wanted != bias).sum())
