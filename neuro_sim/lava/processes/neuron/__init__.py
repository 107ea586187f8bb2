"""SubtractiveLIF: the neuron of the model. Lava's LIF resets to zero and fires at v > vth, so it cannot stand in."""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

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

from neuro_sim.lava.arithmetic import step_fixed, step_float
from neuro_sim.lava.processes.base import Array, TokenModel
from neuro_sim.lava.report import ReportLayout


class SubtractiveLIF(AbstractProcess):
    r"""Leaky integrate-and-fire neurons with a subtractive reset that acts one step later and is not decayed.

        v[t] = decay(v[t-1]) + (a_in[t] << shift) + bias - threshold * s[t-1]
        s[t] = v[t] >= threshold

    fixed_pt: v is 24 bit and saturates, decay(v) = sign(v) * ((|v| * decay) >> 12), a_in is an integer.
    floating_pt: float32, decay(v) = decay * v, shift must be 0.

    Parameters
    ----------
    threshold : array; its shape is the shape of the process, one threshold per neuron
    decay : the integer round(4096 * alpha) for fixed_pt, alpha itself for floating_pt
    bias : array or number added at every step
    shift : left shift of the incoming current (fixed_pt)
    num_steps : steps per token; v and s return to zero when a token begins. 0: they never do

    Ports: a_in (current), s_out (spikes, bool), report (see neuro_sim.lava.report; optional).
    Vars: v (membrane), s (last spikes), threshold, bias, shift, decay.
    """

    def __init__(
        self,
        *,
        threshold: Any,
        decay: float,
        bias: Any = 0,
        shift: int = 0,
        num_steps: int = 0,
        name: str | None = None,
    ) -> None:
        threshold = np.asarray(threshold)
        layout = ReportLayout([threshold.size], num_steps)
        super().__init__(name=name, num_steps=num_steps, layout=layout)
        shape = threshold.shape
        self.a_in = InPort(shape=shape)
        self.s_out = OutPort(shape=shape)
        self.report = OutPort(shape=layout.shape)
        self.v = Var(shape=shape, init=0)
        self.s = Var(shape=shape, init=0)
        self.threshold = Var(shape=shape, init=threshold)
        self.bias = Var(shape=shape, init=np.broadcast_to(np.asarray(bias), shape))
        self.shift = Var(shape=(1,), init=shift)
        self.decay = Var(shape=(1,), init=decay)


class _LIFModel(TokenModel):
    """Shared control; the arithmetic is in `_step`."""

    def run_spk(self) -> None:
        current = self.a_in.recv()
        if self.token_begins:
            self.v[...] = 0
            self.s[...] = False
        saturated = self._step(current)
        self.s_out.send(self.s)
        self.tell([self.s], [saturated])

    def _step(self, current: Array) -> int:
        raise AssertionError("a model without arithmetic")


@implements(proc=SubtractiveLIF, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PySubtractiveLIFFixed(_LIFModel):
    """Bit-accurate: integers as in `spikeopd.contracts`. int64 holds the product of a 24-bit membrane and the decay."""

    a_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64, precision=24)
    s_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    v: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    s: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    threshold: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    bias: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=24)
    shift: np.ndarray = LavaPyType(np.ndarray, np.int64)
    decay: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=13)

    def _step(self, current: Array) -> int:
        return step_fixed(self.v, self.s, current, self.threshold, self.bias, int(self.shift[0]), int(self.decay[0]))


@implements(proc=SubtractiveLIF, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PySubtractiveLIFFloat(_LIFModel):
    """float32, as the exported float model has it."""

    a_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.float32)
    s_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, bool, precision=1)
    report: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.uint8)
    v: np.ndarray = LavaPyType(np.ndarray, np.float32)
    s: np.ndarray = LavaPyType(np.ndarray, bool, precision=1)
    threshold: np.ndarray = LavaPyType(np.ndarray, np.float32)
    bias: np.ndarray = LavaPyType(np.ndarray, np.float32)
    shift: np.ndarray = LavaPyType(np.ndarray, np.int64)
    decay: np.ndarray = LavaPyType(np.ndarray, np.float64)

    def _step(self, current: Array) -> int:
        return step_float(self.v, self.s, current, self.threshold, self.bias, 0, float(self.decay[0]))
