"""SpikingBlock: one layer. A sub-process model shows it part by part ("graph"); a fused model runs it in one process.

Both compute the same spikes. Lava chooses with `select_sub_proc_model` (True: graph) and `select_tag` (precision).
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

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

from neuro_sim.lava import compiled
from neuro_sim.lava.arithmetic import (
    coincidences,
    current_written,
    distance_bias,
    inhibited,
    step_float,
    synapse_matrix,
    synapse_sums,
    weighted_values,
)
from neuro_sim.lava.processes.attention import SpikingAttention, cache_row
from neuro_sim.lava.processes.base import Array, TokenModel, spikes
from neuro_sim.lava.processes.neuron import SubtractiveLIF
from neuro_sim.lava.processes.synapse import CurrentWrite, OneToOneGain, Projection, Residual
from neuro_sim.lava.report import ReportLayout
from spikeopd.contracts import Layer, ModelShape, projections

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
        layout = ReportLayout([shape.site_size(site, capacity - 1) for site in shape.layer_sites], shape.num_steps)
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
        sites = self.proc_params["shape"].layer_sites
        if self.procs.is_empty():
            return [(sites, self.report, self.proc_params["layout"])]
        neurons = {(site,): getattr(self.procs, f"s_{site}") for site in sites if site not in "ar"}
        parts = neurons | {("a", "r"): self.procs.attention}
        return [(group, part.report, part.proc_params["layout"]) for group, part in parts.items()]


@implements(proc=SpikingBlock, protocol=LoihiProtocol)
@tag("graph")
class BlockGraph(AbstractSubProcessModel):
    """The layer part by part: nineteen processes, or fifteen where sublayers write currents instead of spikes."""

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

        def written(site: str, weights: Array) -> tuple[Projection | CurrentWrite, Any]:
            """The synapses of a sublayer's last projection, and the port at which what it adds to h comes out."""
            part = f"{name}.{'w_o' if site == 'o' else 'w_2'}"
            if shape.residual_write == "current":
                shift, bias = (layer.shift_o, layer.bias_o) if site == "o" else (layer.shift_y, layer.bias_y)
                synapses = CurrentWrite(weights=weights, shift=0 if shift is None else shift, bias=bias, name=part)
                return synapses, synapses.a_out
            projection, fired = Projection(weights=weights, name=part), neurons(site)
            gain = OneToOneGain(gain=layer.gain_o if site == "o" else layer.gain_y, name=f"{name}.gain_{site}")
            setattr(self, f"s_{site}", fired)
            setattr(self, f"gain_{site}", gain)
            projection.a_out.connect(fired.a_in)
            fired.s_out.connect(gain.s_in)
            return projection, gain.a_out

        self.w_q = Projection(weights=layer.w_q, name=f"{name}.w_q")
        self.w_k = Projection(weights=layer.w_k, name=f"{name}.w_k")
        self.w_v = Projection(weights=layer.w_v, name=f"{name}.w_v")
        self.w_o, added_o = written("o", layer.w_o)
        self.w_1 = Projection(weights=layer.w_1, name=f"{name}.w_1")
        self.w_2, added_y = written("y", layer.w_2)
        self.s_q, self.s_k, self.s_v = neurons("q"), neurons("k"), neurons("v")
        self.s_x, self.s_f, self.s_h = neurons("x"), neurons("f"), neurons("h")
        self.add_o = Residual(shape=d, name=f"{name}.add_o")
        self.add_y = Residual(shape=d, name=f"{name}.add_y")
        a, r = layer.sites["a"], layer.sites["r"]
        self.attention = SpikingAttention(
            map_threshold=a.threshold, map_bias=a.bias, map_shift=a.shift,
            value_threshold=r.threshold, value_bias=r.bias, value_shift=r.shift, value_inhibition=layer.inhibition,
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
        proc.h_in.connect(self.add_o.h_in)
        added_o.connect(self.add_o.a_in)
        self.add_o.h_out.connect([self.s_x.a_in, self.add_y.h_in])
        self.s_x.s_out.connect(self.w_1.s_in)
        self.w_1.a_out.connect(self.s_f.a_in)
        self.s_f.s_out.connect(self.w_2.s_in)
        added_y.connect(self.add_y.a_in)
        self.add_y.h_out.connect(self.s_h.a_in)
        self.add_y.h_out.connect(proc.h_out)
        self.s_h.s_out.connect(proc.x_out)

        proc.position.alias(self.attention.position)
        if proc.proc_params["reports"]:
            firing = [getattr(self, f"s_{site}") for site in shape.layer_sites if site not in "ar"]
            for part in (*firing, self.attention):
                part.report.flag_external_pipe(buffer_size=REPORTS_IN_FLIGHT)


class _FusedModel(TokenModel):
    """The whole layer in one process, with no messages in between. The precisions differ in a few methods."""

    number: Any  # of membranes and of the residual stream

    def __init__(self, proc_params: Any) -> None:
        super().__init__(proc_params)
        layer: Layer = proc_params["layer"]
        shape: ModelShape = proc_params["shape"]
        self._shape, self._decay, self._capacity = shape, proc_params["decay"], shape.max_position_embeddings
        self._weights = {name: self._synapses(getattr(layer, name)) for name in (c.name for c in projections(shape))}
        self._writes = {site: self._write_arrays(layer, site) for site in "oy"}
        self._sites = {
            site: (group.threshold.astype(self.number), group.bias.astype(self.number), group.shift)
            for site, group in layer.sites.items()
        }
        threshold, bias, shift = self._sites["a"]  # without a distance bias: one for every distance
        self._sites["a"] = threshold, bias.reshape(shape.num_attention_heads, -1), shift
        self._inhibition, self._value_shift = None, self._sites["r"][2]
        if layer.inhibition is not None:  # S_AV then hears membrane units
            self._inhibition, self._sites["r"] = layer.inhibition.astype(self.number), (*self._sites["r"][:2], 0)
        sites = shape.layer_sites
        sizes: dict[str, tuple[int, ...]] = {site: (shape.site_size(site, 0),) for site in sites}
        sizes["a"] = (shape.num_attention_heads, self._capacity)
        self._v = {site: np.zeros(sizes[site], self.number) for site in sites}
        self._s = {site: np.zeros(sizes[site], bool) for site in sites}
        self._hits = dict.fromkeys(sites, 0)
        self._values = np.zeros((shape.num_steps, self._capacity, shape.hidden_size), bool)

    def run_spk(self) -> None:
        x, h = spikes(self.x_in), self.h_in.recv()
        if self.token_begins:
            for site in self._v:
                self._v[site][...] = 0
                self._s[site][...] = False
        row = cache_row(self.position, self._capacity)
        q, k, v = (self._fire(site, self._project(x, f"w_{site}")) for site in "qkv")
        self._values[self.tau, row] = v
        z = self._attend(q, k, row)
        if self._inhibition is not None:
            z = inhibited(z, self._s["a"], self._inhibition, self._value_shift)
        r = self._fire("r", z)
        h = self._write(h, "o", self._project(r, "w_o"))
        f = self._fire("f", self._project(self._fire("x", h), "w_1"))
        h = self._write(h, "y", self._project(f, "w_2"))
        self.x_out.send(self._fire("h", h))
        self.h_out.send(h)
        self.tell(list(self._s.values()), list(self._hits.values()))
        if self.token_ends:
            self.position[0] += 1

    def _write_arrays(self, layer: Layer, site: str) -> tuple[Array, ...]:
        """(gain,), or (shift, bias) of a current write."""
        if self._shape.residual_write == "spike":
            gain = layer.gain_o if site == "o" else layer.gain_y
            assert gain is not None
            return (gain.astype(self.number),)
        shift, bias = (layer.shift_o, layer.bias_o) if site == "o" else (layer.shift_y, layer.bias_y)
        assert bias is not None
        return np.zeros(bias.shape, np.int64) if shift is None else shift.astype(np.int64), bias.astype(self.number)

    def _write(self, h: Array, site: str, sums: Array) -> Array:
        """h plus what a sublayer adds to it: its neurons' spikes times gains, or its sums themselves."""
        if self._shape.residual_write == "spike":
            return np.asarray(h + self._fire(site, sums) * self._writes[site][0])
        return self._add_current(h, sums, *self._writes[site])

    def _add_current(self, h: Array, sums: Array, shift: Array, bias: Array) -> Array:
        raise AssertionError("a model without arithmetic")

    def _synapses(self, weights: Array) -> Array:
        """Weights as `_project` wants them."""
        raise AssertionError("a model without arithmetic")

    def _project(self, fired: Array, name: str) -> Array:
        raise AssertionError("a model without arithmetic")

    def _fire(self, site: str, current: Array) -> Array:
        raise AssertionError("a model without arithmetic")

    def _attend(self, q: Array, k: Array, row: int) -> Array:
        """Remember the keys, fire S_A and return Z."""
        raise AssertionError("a model without arithmetic")


@implements(proc=SpikingBlock, protocol=LoihiProtocol)
@requires(CPU)
@tag("fused", "fixed_pt")
class PyBlockFixed(_FusedModel):
    """Bit-accurate, in compiled loops that read only the weight rows of inputs that spiked."""

    x_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64, precision=32)
    x_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    h_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64, precision=32)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    position: np.ndarray = LavaPyType(np.ndarray, np.int64)
    number = np.int64

    def __init__(self, proc_params: Any) -> None:
        super().__init__(proc_params)
        heads, words = self._shape.num_attention_heads, -(-self._shape.head_dim // 64)
        self._query = np.zeros((heads, words), np.uint64)
        self._keys = np.zeros((self._shape.num_steps, self._capacity, heads, words), np.uint64)
        self._sums = {name: np.zeros(weights.shape[1], np.int32) for name, weights in self._weights.items()}
        self._z = np.zeros(self._shape.hidden_size, np.int32)

    def _synapses(self, weights: Array) -> Array:
        return np.ascontiguousarray(weights)

    def _project(self, fired: Array, name: str) -> Array:
        compiled.project(fired, self._weights[name], self._sums[name])
        return self._sums[name]

    def _add_current(self, h: Array, sums: Array, shift: Array, bias: Array) -> Array:
        h = h.astype(np.int64)  # a copy: the receiver's own
        compiled.write(h, sums, shift, bias)
        return h

    def _fire(self, site: str, current: Array) -> Array:
        self._hits[site] = compiled.fire(self._v[site], self._s[site], current, *self._sites[site], self._decay)
        return self._s[site]

    def _attend(self, q: Array, k: Array, row: int) -> Array:
        compiled.pack(q, self._query)
        compiled.pack(k, self._keys[self.tau, row])
        keys, values = self._keys[self.tau, : row + 1], self._values[self.tau].view(np.uint8)
        self._hits["a"] = compiled.attend(
            self._query, keys, values, self._v["a"], self._s["a"], *self._sites["a"], self._decay, self._z
        )
        return self._z


@implements(proc=SpikingBlock, protocol=LoihiProtocol)
@requires(CPU)
@tag("fused", "floating_pt")
class PyBlockFloat(_FusedModel):
    """float32, with the functions that the parts of the graph use."""

    x_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.float32)
    x_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    h_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    position: np.ndarray = LavaPyType(np.ndarray, np.int64)
    number = np.float32

    def __init__(self, proc_params: Any) -> None:
        super().__init__(proc_params)
        self._keys = np.zeros_like(self._values)

    def _synapses(self, weights: Array) -> Array:
        return synapse_matrix(weights)

    def _project(self, fired: Array, name: str) -> Array:
        return synapse_sums(fired, self._weights[name])

    def _add_current(self, h: Array, sums: Array, shift: Array, bias: Array) -> Array:
        return np.asarray(h + current_written(sums, shift, bias))

    def _fire(self, site: str, current: Array) -> Array:
        self._hits[site] = step_float(self._v[site], self._s[site], current, *self._sites[site], self._decay)
        return self._s[site]

    def _attend(self, q: Array, k: Array, row: int) -> Array:
        self._keys[self.tau, row] = k
        seen = slice(0, row + 1)
        v, s = self._v["a"][:, seen], self._s["a"][:, seen]
        counts = coincidences(q, self._keys[self.tau, seen], self._shape.num_attention_heads)
        threshold, bias, _ = self._sites["a"]
        step_float(v, s, counts, threshold[:, None], distance_bias(bias, row + 1), 0, self._decay)
        return weighted_values(s, self._values[self.tau, seen])
