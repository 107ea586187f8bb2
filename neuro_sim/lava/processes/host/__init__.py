"""The ends towards the host: EmbeddingInjector, RateReadout, ResidualReadout.

The first takes a token's current; the others give back its spike counts, or the sum of its residual stream. All use
Lava's external pipes (`flag_external_pipe`): a channel between the program and the process model, so no element-wise
Var traffic and no helper thread of ours.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

import numpy as np
from lava.magma.core.decorator import implements, requires, tag
from lava.magma.core.model.py.ports import PyInPort, PyOutPort
from lava.magma.core.model.py.type import LavaPyType
from lava.magma.core.process.ports.ports import InPort, OutPort
from lava.magma.core.process.process import AbstractProcess
from lava.magma.core.process.variable import Var
from lava.magma.core.resources import CPU
from lava.magma.core.sync.protocols.loihi_protocol import LoihiProtocol

from neuro_sim.lava.processes.base import Array, TokenModel, spikes

_TOKENS_IN_FLIGHT = 2  # the host sends a token, runs it and reads the answer; one more slot for good measure


class EmbeddingInjector(AbstractProcess):
    """Emits the embedding current of one token at each of its num_steps steps. `send` gives it the next token's.

    Ports: host_in (external pipe), a_out (int64 or float32). Vars: current (what is being emitted).
    """

    def __init__(self, *, shape: tuple[int, ...], num_steps: int, name: str | None = None) -> None:
        super().__init__(name=name, num_steps=num_steps)
        self.host_in = InPort(shape=shape)
        self.host_in.flag_external_pipe(buffer_size=_TOKENS_IN_FLIGHT)
        self.a_out = OutPort(shape=shape)
        self.current = Var(shape=shape, init=0)

    def send(self, current: Array) -> None:
        """Hand over the current of the next token. The runtime must exist; run num_steps steps afterwards."""
        self.host_in.external_pipe_csp_send_port.send(current)


class RateReadout(AbstractProcess):
    """Counts the spikes of one token, sum over its num_steps steps, and gives the counts to the host (`receive`).

    Ports: s_in (spikes, bool), host_out (external pipe, int64). Vars: count.
    """

    def __init__(self, *, shape: tuple[int, ...], num_steps: int, name: str | None = None) -> None:
        super().__init__(name=name, num_steps=num_steps)
        self.s_in = InPort(shape=shape)
        self.host_out = OutPort(shape=shape)
        self.host_out.flag_external_pipe(buffer_size=_TOKENS_IN_FLIGHT)
        self.count = Var(shape=shape, init=0)

    def receive(self) -> Array:
        """Spike counts of the oldest token not yet read, int64. Blocks until it has been run."""
        counts: Array = self.host_out.external_pipe_csp_recv_port.recv()
        return counts


class ResidualReadout(AbstractProcess):
    """Sums the residual stream of one token over its num_steps steps and gives the sums to the host (`receive`).

    Ports: h_in (int64 or float32), host_out (external pipe, the same type). Vars: total.
    """

    def __init__(self, *, shape: tuple[int, ...], num_steps: int, name: str | None = None) -> None:
        super().__init__(name=name, num_steps=num_steps)
        self.h_in = InPort(shape=shape)
        self.host_out = OutPort(shape=shape)
        self.host_out.flag_external_pipe(buffer_size=_TOKENS_IN_FLIGHT)
        self.total = Var(shape=shape, init=0)

    def receive(self) -> Array:
        """Sums of the oldest token not yet read. Blocks until it has been run."""
        sums: Array = self.host_out.external_pipe_csp_recv_port.recv()
        return sums


class _InjectorModel(TokenModel):
    def run_spk(self) -> None:
        if self.token_begins:
            self.current[...] = self.host_in.recv()
        self.a_out.send(self.current)


@implements(proc=EmbeddingInjector, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PyEmbeddingInjectorFixed(_InjectorModel):
    host_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64, precision=32)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64, precision=32)
    current: np.ndarray = LavaPyType(np.ndarray, np.int64, precision=32)


@implements(proc=EmbeddingInjector, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PyEmbeddingInjectorFloat(_InjectorModel):
    host_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.float32)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
    current: np.ndarray = LavaPyType(np.ndarray, np.float32)


@implements(proc=RateReadout, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt", "floating_pt")
class PyRateReadout(TokenModel):
    """One model for both precisions: counts are integers either way."""

    s_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, bool, precision=1)
    host_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64)
    count: np.ndarray = LavaPyType(np.ndarray, np.int64)

    def run_spk(self) -> None:
        fired = spikes(self.s_in)
        if self.token_begins:
            self.count[...] = 0
        self.count += fired
        if self.token_ends:
            self.host_out.send(self.count)


class _ResidualReadoutModel(TokenModel):
    def run_spk(self) -> None:
        stream = self.h_in.recv()
        if self.token_begins:
            self.total[...] = 0
        self.total += stream
        if self.token_ends:
            self.host_out.send(self.total)


@implements(proc=ResidualReadout, protocol=LoihiProtocol)
@requires(CPU)
@tag("fixed_pt")
class PyResidualReadoutFixed(_ResidualReadoutModel):
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64, precision=32)
    host_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64)
    total: np.ndarray = LavaPyType(np.ndarray, np.int64)


@implements(proc=ResidualReadout, protocol=LoihiProtocol)
@requires(CPU)
@tag("floating_pt")
class PyResidualReadoutFloat(_ResidualReadoutModel):
    h_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.float32)
    host_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.float32)
    total: np.ndarray = LavaPyType(np.ndarray, np.float32)
