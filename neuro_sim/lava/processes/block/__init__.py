"""SpikingBlock: one layer. A sub-process model shows it part by part ("graph"); a fused model runs it in one process.

Both compute the same spikes. Lava chooses with `select_sub_proc_model` (True: graph) and `select_tag` (precision).
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from lava.magma.core.decorator import implements, requires, tag
from lava.magma.core.model.py.ports import PyInPort, PyOutPort
from lava.magma.core.model.py.type import LavaPyType
from lava.magma.core.model.sub.model import AbstractSubProcessModel
from lava.magma.core.process.ports.ports import InPort, OutPort
from lava.magma.core.process.process import AbstractProcess
from lava.magma.core.process.variable import Var
from lava.magma.core.resources import CPU
from lava.magma.core.sync.protocols.loihi_protocol import LoihiProtocol

from neuro_sim.lava.arithmetic import (
    coincidences,
    step_fixed,
    step_float,
    synapse_matrix,
    synapse_sums,
    weighted_values,
)
from neuro_sim.lava.processes.attention import SpikingAttention, cache_row
from neuro_sim.lava.processes.base import Array, TokenModel, spikes
from neuro_sim.lava.processes.neuron import SubtractiveLIF
from neuro_sim.lava.processes.synapse import OneToOneGain, Projection, Residual
from neuro_sim.lava.report import ReportLayout
from spikeopd.contracts import LAYER_SITES, Layer, ModelShape

REPORTS_IN_FLIGHT = 2


class SpikingBlock(AbstractProcess):
    """One layer of the model, from the spikes X and the residual stream h to the next layer's.

    Parameters
    ----------
    layer : spikeopd.contracts.Layer;  shape : spikeopd.contracts.ModelShape
    decay : as for SubtractiveLIF
    reports : whether the neurons report their spikes to the host (ports `report`, see neuro_sim.lava.report)

    Ports: x_in, x_out [d] (spikes, bool), h_in, h_out [d] (int64 or float32), report (fused model only).
    Vars: position [1] (tokens cached so far; set it to 0 to begin a new sequence).
    """

    def __init__(
        self, *, layer: Layer, shape: ModelShape, decay: float, reports: bool = False, name: str | None = None
    ) -> None:
        capacity = shape.max_position_embeddings
        layout = ReportLayout([shape.site_size(site, capacity - 1) for site in LAYER_SITES], shape.num_steps)
        super().__init__(
            name=name, layer=layer, shape=shape, decay=decay, reports=reports, layout=layout, num_steps=shape.num_steps
        )
        d = shape.hidden_size
        self.x_in, self.h_in = InPort(shape=(d,)), InPort(shape=(d,))
        self.x_out, self.h_out = OutPort(shape=(d,)), OutPort(shape=(d,))
        self.report = OutPort(shape=layout.shape)
        self.position = Var(shape=(1,), init=0)

    def site_reports(self) -> list[tuple[tuple[str, ...], Any, ReportLayout]]:
        """After compilation: which sites report through which port, whichever model was chosen."""
        if self.procs.is_empty():
            return [(LAYER_SITES, self.report, self.proc_params["layout"])]
        neurons = {(site,): getattr(self.procs, f"s_{site}") for site in LAYER_SITES if site not in "ar"}
        parts = neurons | {("a", "r"): self.procs.attention}
        return [(sites, part.report, part.proc_params["layout"]) for sites, part in parts.items()]


@implements(proc=SpikingBlock, protocol=LoihiProtocol)
@tag("graph")
class BlockGraph(AbstractSubProcessModel):
    """The layer as nineteen processes, one per part. Every part of the picture is a process of its own."""

    def __init__(self, proc: SpikingBlock) -> None:
        layer: Layer = proc.proc_params["layer"]
        shape: ModelShape = proc.proc_params["shape"]
        decay, name, d = proc.proc_params["decay"], proc.name, (shape.hidden_size,)

        def neurons(site: str) -> SubtractiveLIF:
            group = layer.sites[site]
            return SubtractiveLIF(
                threshold=group.threshold, bias=group.bias, shift=group.shift, decay=decay,
                num_steps=shape.num_steps, name=f"{name}.s_{site}",
            )  # fmt: skip

        self.w_q = Projection(weights=layer.w_q, name=f"{name}.w_q")
        self.w_k = Projection(weights=layer.w_k, name=f"{name}.w_k")
        self.w_v = Projection(weights=layer.w_v, name=f"{name}.w_v")
        self.w_o = Projection(weights=layer.w_o, name=f"{name}.w_o")
        self.w_1 = Projection(weights=layer.w_1, name=f"{name}.w_1")
        self.w_2 = Projection(weights=layer.w_2, name=f"{name}.w_2")
        self.s_q, self.s_k, self.s_v = neurons("q"), neurons("k"), neurons("v")
        self.s_o, self.s_x, self.s_f = neurons("o"), neurons("x"), neurons("f")
        self.s_y, self.s_h = neurons("y"), neurons("h")
        self.gain_o = OneToOneGain(gain=layer.gain_o, name=f"{name}.gain_o")
        self.gain_y = OneToOneGain(gain=layer.gain_y, name=f"{name}.gain_y")
        self.add_o = Residual(shape=d, name=f"{name}.add_o")
        self.add_y = Residual(shape=d, name=f"{name}.add_y")
        self.attention = SpikingAttention(
            map_threshold=layer.sites["a"].threshold, map_shift=layer.sites["a"].shift,
            value_threshold=layer.sites["r"].threshold, value_shift=layer.sites["r"].shift,
            decay=decay, num_steps=shape.num_steps, capacity=shape.max_position_embeddings, name=f"{name}.attention",
        )  # fmt: skip

        proc.x_in.connect([self.w_q.s_in, self.w_k.s_in, self.w_v.s_in])
        self.w_q.a_out.connect(self.s_q.a_in)
        self.w_k.a_out.connect(self.s_k.a_in)
        self.w_v.a_out.connect(self.s_v.a_in)
        self.s_q.s_out.connect(self.attention.q_in)
        self.s_k.s_out.connect(self.attention.k_in)
        self.s_v.s_out.connect(self.attention.v_in)
        self.attention.s_out.connect(self.w_o.s_in)
        self.w_o.a_out.connect(self.s_o.a_in)
        self.s_o.s_out.connect(self.gain_o.s_in)
        proc.h_in.connect(self.add_o.h_in)
        self.gain_o.a_out.connect(self.add_o.a_in)
        self.add_o.h_out.connect([self.s_x.a_in, self.add_y.h_in])
        self.s_x.s_out.connect(self.w_1.s_in)
        self.w_1.a_out.connect(self.s_f.a_in)
        self.s_f.s_out.connect(self.w_2.s_in)
        self.w_2.a_out.connect(self.s_y.a_in)
        self.s_y.s_out.connect(self.gain_y.s_in)
        self.gain_y.a_out.connect(self.add_y.a_in)
        self.add_y.h_out.connect(self.s_h.a_in)
        self.add_y.h_out.connect(proc.h_out)
        self.s_h.s_out.connect(proc.x_out)

        proc.position.alias(self.attention.position)
        if proc.proc_params["reports"]:
            for part in (
                self.s_q,
                self.s_k,
                self.s_v,
                self.attention,
                self.s_o,
                self.s_x,
                self.s_f,
                self.s_y,
                self.s_h,
            ):
                part.report.flag_external_pipe(buffer_size=REPORTS_IN_FLIGHT)


class _FusedModel(TokenModel):
    """The whole layer in one process: the same arithmetic as the parts, with no messages in between."""

    step: Callable[..., int]
    membrane: Any
    stream: Any

    def __init__(self, proc_params: Any) -> None:
        super().__init__(proc_params)
        layer: Layer = proc_params["layer"]
        shape: ModelShape = proc_params["shape"]
        self._decay = proc_params["decay"]
        self._heads, self._capacity = shape.num_attention_heads, shape.max_position_embeddings
        self._matrices = {
            name: synapse_matrix(getattr(layer, name)) for name in ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2")
        }
        self._gain_o, self._gain_y = layer.gain_o.astype(self.stream), layer.gain_y.astype(self.stream)
        self._sites = {
            site: (group.threshold.astype(self.membrane), group.bias.astype(self.membrane), group.shift)
            for site, group in layer.sites.items()
        }
        sizes: dict[str, tuple[int, ...]] = {site: (shape.site_size(site, self._capacity - 1),) for site in LAYER_SITES}
        sizes["a"] = (self._heads, self._capacity)
        threshold, _, shift = self._sites["a"]
        self._sites["a"] = (threshold.reshape(-1, 1), np.zeros((1, 1), self.membrane), shift)
        self._v = {site: np.zeros(sizes[site], self.membrane) for site in LAYER_SITES}
        self._s = {site: np.zeros(sizes[site], bool) for site in LAYER_SITES}
        self._hits = dict.fromkeys(LAYER_SITES, 0)
        cache = (shape.num_steps, self._capacity, shape.hidden_size)
        self._keys, self._values = np.zeros(cache, bool), np.zeros(cache, bool)

    def run_spk(self) -> None:
        x, h = spikes(self.x_in), self.h_in.recv()
        if self.token_begins:
            for site in LAYER_SITES:
                self._v[site][...] = 0
                self._s[site][...] = False
        row = cache_row(self.position, self._capacity)
        keys, values, seen = self._keys[self.tau], self._values[self.tau], slice(0, row + 1)
        q = self._fire("q", self._project(x, "w_q"))
        keys[row] = self._fire("k", self._project(x, "w_k"))
        values[row] = self._fire("v", self._project(x, "w_v"))
        a = self._fire("a", coincidences(q, keys[seen], self._heads), seen)
        r = self._fire("r", weighted_values(a, values[seen]))
        h = h + self._fire("o", self._project(r, "w_o")) * self._gain_o
        f = self._fire("f", self._project(self._fire("x", h), "w_1"))
        h = h + self._fire("y", self._project(f, "w_2")) * self._gain_y
        self.x_out.send(self._fire("h", h))
        self.h_out.send(h)
        self.tell(list(self._s.values()), list(self._hits.values()))
        if self.token_ends:
            self.position[0] += 1

    def _fire(self, site: str, current: Array, columns: slice = slice(None)) -> Array:
        threshold, bias, shift = self._sites[site]
        v, s = self._v[site][..., columns], self._s[site][..., columns]
        self._hits[site] = type(self).step(v, s, current, threshold, bias, shift, self._decay)
        return s

    def _project(self, spikes: Array, name: str) -> Array:
        return synapse_sums(spikes, self._matrices[name])


@implements(proc=SpikingBlock, protocol=LoihiProtocol)
@requires(CPU)
@tag("fused", "fixed_pt")
class PyBlockFixed(_FusedModel):
    """Bit-accurate."""

    x_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64, precision=32)
    x_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    h_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64, precision=32)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    position: np.ndarray = LavaPyType(np.ndarray, np.int64)
    step = staticmethod(step_fixed)
    membrane = np.int64
    stream = np.int64

    def _project(self, spikes: Array, name: str) -> Array:
        return super()._project(spikes, name).astype(np.int64)


@implements(proc=SpikingBlock, protocol=LoihiProtocol)
@requires(CPU)
@tag("fused", "floating_pt")
class PyBlockFloat(_FusedModel):
    """float32."""

    x_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.float32)
    x_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    h_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    position: np.ndarray = LavaPyType(np.ndarray, np.int64)
    step = staticmethod(step_float)
    membrane = np.float32
    stream = np.float32
