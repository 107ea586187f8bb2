"""SpikingAttention: coincidences of query and cached key spikes, the map S_A, the sum of cached value spikes S_AV."""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from lava.magma.core.decorator import implements, requires, tag
from lava.magma.core.model.py.ports import PyInPort, PyOutPort
from lava.magma.core.model.py.type import LavaPyType
from lava.magma.core.process.ports.ports import InPort, OutPort
from lava.magma.core.process.process import AbstractProcess
from lava.magma.core.process.variable import Var
from lava.magma.core.resources import CPU
from lava.magma.core.sync.protocols.loihi_protocol import LoihiProtocol

from neuro_sim.lava.arithmetic import coincidences, distance_bias, inhibited, step_fixed, step_float, weighted_values
from neuro_sim.lava.processes.base import Array, TokenModel, spikes
from neuro_sim.lava.report import ReportLayout


class SpikingAttention(AbstractProcess):
    r"""Causal multi-head attention on spikes, one token of num_steps steps at a time, keys and values cached as bits.

        C[h, j] = |Q_h and K_jh|      A[h, j] = S_A(C[h, j])      Z_h = sum_j A[h, j] V_jh      R = S_AV(Z)

    over the positions j up to the current one; K_j and V_j at step tau are those of token j at its own step tau. Both
    neurons are those of SubtractiveLIF, with biases: that of A[h, j] belongs to the distance i - j, so that with one a
    pair may fire without a coincidence. The process counts its tokens: after num_steps steps the position advances by
    one. Setting the Var `position` to 0 between two tokens begins a new sequence. With `value_inhibition` every spike
    of A[h, .] adds that to the neurons of its head in S_AV too.

    Parameters
    ----------
    map_threshold : [heads], threshold of S_A;  value_threshold : [heads * head_dim], threshold of S_AV
    map_bias : [heads, distances], the last entry for every larger distance; or [heads], for all; or a number
    value_bias : [heads * head_dim] or a number
    value_inhibition : [heads * head_dim] in membrane units, negative where it inhibits; None: no such synapses
    map_shift, value_shift : left shift of the counts (fixed_pt)
    decay, num_steps : as for SubtractiveLIF; num_steps must not be 0
    capacity : positions the cache can hold; one token more raises an error in the process

    Ports: q_in, k_in, v_in [d] (spikes, bool), s_out [d] (R, bool), report (sites a, r; `a` is [heads, capacity]).
    Vars: keys, values [num_steps, capacity, d] (bool), position [1], map_threshold, value_threshold,
    map_bias [heads, distances], value_bias, value_inhibition, map_v, map_s [heads, capacity], value_v, value_s [d].
    """

    def __init__(
        self,
        *,
        map_threshold: Any,
        value_threshold: Any,
        decay: float,
        num_steps: int,
        capacity: int,
        map_bias: Any = 0,
        value_bias: Any = 0,
        value_inhibition: Any = None,
        map_shift: int = 0,
        value_shift: int = 0,
        name: str | None = None,
    ) -> None:
        map_threshold, value_threshold = np.asarray(map_threshold), np.asarray(value_threshold)
        heads, (d,) = map_threshold.size, value_threshold.shape
        map_bias, value_bias = np.asarray(map_bias), np.broadcast_to(np.asarray(value_bias), (d,))
        if map_bias.ndim < 2:  # the same at every distance
            map_bias = np.broadcast_to(map_bias.reshape(-1, 1), (heads, 1))
        layout = ReportLayout([heads * capacity, d], num_steps)
        super().__init__(
            name=name, num_steps=num_steps, layout=layout, decay=decay, map_shift=map_shift, value_shift=value_shift,
            inhibiting=value_inhibition is not None,
        )  # fmt: skip
        self.q_in, self.k_in, self.v_in = InPort(shape=(d,)), InPort(shape=(d,)), InPort(shape=(d,))
        self.s_out = OutPort(shape=(d,))
        self.report = OutPort(shape=layout.shape)
        self.keys = Var(shape=(num_steps, capacity, d), init=0)
        self.values = Var(shape=(num_steps, capacity, d), init=0)
        self.position = Var(shape=(1,), init=0)
        self.map_threshold = Var(shape=(heads, 1), init=map_threshold.reshape(heads, 1))
        self.value_threshold = Var(shape=(d,), init=value_threshold)
        self.map_bias = Var(shape=map_bias.shape, init=map_bias)
        self.value_bias = Var(shape=(d,), init=value_bias)
        self.value_inhibition = Var(shape=(d,), init=0 if value_inhibition is None else np.asarray(value_inhibition))
        self.map_v = Var(shape=(heads, capacity), init=0)
        self.map_s = Var(shape=(heads, capacity), init=0)
        self.value_v = Var(shape=(d,), init=0)
        self.value_s = Var(shape=(d,), init=0)


def cache_row(position: Array, capacity: int) -> int:
    """The row of the cache the current token writes; an error if the cache is full."""
    row = int(position[0])
    if row >= capacity:
        raise OverflowError(f"the key/value cache is full: it holds {capacity} positions")
    return row


class _AttentionModel(TokenModel):
    step: Callable[..., int]

    def run_spk(self) -> None:
        q, k, v = spikes(self.q_in), spikes(self.k_in), spikes(self.v_in)
        if self.token_begins:
            for state in (self.map_v, self.map_s, self.value_v, self.value_s):
                state[...] = 0
        row = cache_row(self.position, self.keys.shape[1])
        keys, values = self.keys[self.tau], self.values[self.tau]
        keys[row], values[row] = k, v
        seen = slice(0, row + 1)
        heads = self.map_threshold.shape[0]
        map_v, map_s = self.map_v[:, seen], self.map_s[:, seen]
        step, decay, shift = type(self).step, self.proc_params["decay"], self.proc_params["map_shift"]
        counts, bias = coincidences(q, keys[seen], heads), distance_bias(self.map_bias, row + 1)
        map_hits = step(map_v, map_s, counts, self.map_threshold, bias, shift, decay)
        z, shift = weighted_values(map_s, values[seen]), self.proc_params["value_shift"]
        if self.proc_params["inhibiting"]:
            z, shift = inhibited(z, map_s, self.value_inhibition, shift), 0
        hits = step(self.value_v, self.value_s, z, self.value_threshold, self.value_bias, shift, decay)
        self.s_out.send(self.value_s)
        self.tell([self.map_s, self.value_s], [map_hits, hits])
        if self.token_ends:
            self.position[0] += 1


@implements(proc=SpikingAttention, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PySpikingAttentionFixed(_AttentionModel):
    """Bit-accurate: 24-bit saturating membranes, exact counts."""

    q_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    k_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    v_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    s_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    keys: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    values: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    position: np.ndarray = LavaPyType(np.ndarray, np.int64)
    map_threshold: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    value_threshold: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    map_bias: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    value_bias: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    value_inhibition: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    map_v: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    map_s: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    value_v: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    value_s: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    step = staticmethod(step_fixed)


@implements(proc=SpikingAttention, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PySpikingAttentionFloat(_AttentionModel):
    """float32 membranes and thresholds; counts are integers all the same."""

    q_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    k_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    v_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    s_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    keys: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    values: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    position: np.ndarray = LavaPyType(np.ndarray, np.int64)
    map_threshold: np.ndarray = LavaPyType(np.ndarray, np.float32)
    value_threshold: np.ndarray = LavaPyType(np.ndarray, np.float32)
    map_bias: np.ndarray = LavaPyType(np.ndarray, np.float32)
    value_bias: np.ndarray = LavaPyType(np.ndarray, np.float32)
    value_inhibition: np.ndarray = LavaPyType(np.ndarray, np.float32)
    map_v: np.ndarray = LavaPyType(np.ndarray, np.float32)
    map_s: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    value_v: np.ndarray = LavaPyType(np.ndarray, np.float32)
    value_s: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    step = staticmethod(step_float)
