"""The connections: Projection and CurrentWrite (dense), OneToOneGain and Residual. All of them without delay.

Why not Lava's stock Dense: it sends at step t what arrived at t - 1 (its first output is zero), so every layer would
lag by one more step, and its fixed-point model clears the lowest bit of mixed-sign 8-bit weights. Projection sends at
once and keeps every bit. The graph has no cycles, so nothing needs the delay to break one.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import numpy as np
from lava.magma.core.decorator import implements, requires, tag
from lava.magma.core.model.py.model import PyLoihiProcessModel
from lava.magma.core.model.py.ports import PyInPort, PyOutPort
from lava.magma.core.model.py.type import LavaPyType
from lava.magma.core.process.ports.ports import InPort, OutPort
from lava.magma.core.process.process import AbstractProcess
from lava.magma.core.process.variable import Var
from lava.magma.core.resources import CPU
from lava.magma.core.sync.protocols.loihi_protocol import LoihiProtocol

from neuro_sim.lava.arithmetic import current_written, synapse_matrix, synapse_sums
from neuro_sim.lava.processes.base import Array, spikes


class Projection(AbstractProcess):
    """Dense synapses without delay: a_out = sum of the weight rows of the inputs that spiked.

    Parameters
    ----------
    weights : [inputs, outputs], one row per input; int8 for fixed_pt, float32 for floating_pt

    Ports: s_in [inputs] (spikes, bool), a_out [outputs] (int32 or float32). Vars: weights.
    """

    def __init__(self, *, weights: Array, name: str | None = None) -> None:
        super().__init__(name=name)
        self.s_in = InPort(shape=(weights.shape[0],))
        self.a_out = OutPort(shape=(weights.shape[1],))
        self.weights = Var(shape=weights.shape, init=weights)


class CurrentWrite(AbstractProcess):
    """Dense synapses that add to the residual stream without a neuron: a_out = (Projection's sums << shift) + bias.

    Parameters
    ----------
    weights : as for Projection;  bias : [outputs] or a number, added at every step
    shift : [outputs] or a number, left shift of each output's sum (fixed_pt; in floating_pt the weights have it)

    Ports: s_in [inputs] (spikes, bool), a_out [outputs] (int64 or float32). Vars: weights, shift, bias.
    """

    def __init__(self, *, weights: Array, bias: Any = 0, shift: Any = 0, name: str | None = None) -> None:
        super().__init__(name=name)
        outputs = weights.shape[1:]
        self.s_in = InPort(shape=(weights.shape[0],))
        self.a_out = OutPort(shape=outputs)
        self.weights = Var(shape=weights.shape, init=weights)
        self.shift = Var(shape=outputs, init=np.broadcast_to(np.asarray(shift), outputs))
        self.bias = Var(shape=outputs, init=np.broadcast_to(np.asarray(bias), outputs))


class OneToOneGain(AbstractProcess):
    """Synapses from neuron i to neuron i: a spike adds the constant gain[i], of either sign.

    Ports: s_in (spikes, bool), a_out (int64 or float32). Vars: gain.
    """

    def __init__(self, *, gain: Any, name: str | None = None) -> None:
        gain = np.asarray(gain)
        super().__init__(name=name)
        self.s_in = InPort(shape=gain.shape)
        self.a_out = OutPort(shape=gain.shape)
        self.gain = Var(shape=gain.shape, init=gain)


class Residual(AbstractProcess):
    """One station of the residual stream: h_out = h_in + a_in, within the same step.

    Ports: h_in (stream so far), a_in (what a sublayer adds), h_out (int64 or float32). No Vars.
    """

    def __init__(self, *, shape: tuple[int, ...], name: str | None = None) -> None:
        super().__init__(name=name)
        self.h_in = InPort(shape=shape)
        self.a_in = InPort(shape=shape)
        self.h_out = OutPort(shape=shape)


class _ProjectionModel(PyLoihiProcessModel):
    """Multiplies with a float32 copy of the weights, which is exact for int8 (see arithmetic)."""

    _matrix: Array | None = None

    def run_spk(self) -> None:
        if self._matrix is None:
            self._matrix = synapse_matrix(self.weights)
        self.a_out.send(self._sent(synapse_sums(spikes(self.s_in), self._matrix)))  # the channel casts to its own type

    def _sent(self, sums: Array) -> Array:
        return sums

    def on_var_update(self) -> None:
        self._matrix = None


@implements(proc=Projection, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PyProjectionFixed(_ProjectionModel):
    s_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int32, precision=24)
    weights: np.ndarray = LavaPyType(np.ndarray, np.int8, precision=8)


@implements(proc=Projection, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PyProjectionFloat(_ProjectionModel):
    s_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
    weights: np.ndarray = LavaPyType(np.ndarray, np.float32)


class _CurrentWriteModel(_ProjectionModel):
    def _sent(self, sums: Array) -> Array:
        return current_written(sums, self.shift, self.bias)


@implements(proc=CurrentWrite, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PyCurrentWriteFixed(_CurrentWriteModel):
    s_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64, precision=32)
    weights: np.ndarray = LavaPyType(np.ndarray, np.int8, precision=8)
    shift: np.ndarray = LavaPyType(np.ndarray, np.int64)
    bias: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=32)


@implements(proc=CurrentWrite, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PyCurrentWriteFloat(_CurrentWriteModel):
    s_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
    weights: np.ndarray = LavaPyType(np.ndarray, np.float32)
    shift: np.ndarray = LavaPyType(np.ndarray, np.int64)
    bias: np.ndarray = LavaPyType(np.ndarray, np.float32)


class _GainModel(PyLoihiProcessModel):
    def run_spk(self) -> None:
        self.a_out.send(spikes(self.s_in) * self.gain)


@implements(proc=OneToOneGain, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PyOneToOneGainFixed(_GainModel):
    s_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64, precision=32)
    gain: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=32)


@implements(proc=OneToOneGain, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PyOneToOneGainFloat(_GainModel):
    s_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
    gain: np.ndarray = LavaPyType(np.ndarray, np.float32)


class _ResidualModel(PyLoihiProcessModel):
    def run_spk(self) -> None:
        self.h_out.send(self.h_in.recv() + self.a_in.recv())


@implements(proc=Residual, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PyResidualFixed(_ResidualModel):
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64, precision=32)
    a_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64, precision=32)
    h_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64, precision=32)


@implements(proc=Residual, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PyResidualFloat(_ResidualModel):
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.float32)
    a_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.float32)
    h_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
