"""Lava processes that misbehave, for the tests of the watchdog. A package of one file: see neuro_sim.lava.processes."""

from __future__ import annotations

import time

import numpy as np

from neuro_sim.lava.compat import require_lava

require_lava()

from lava.magma.core.decorator import implements, requires  # noqa: E402
from lava.magma.core.model.py.model import PyLoihiProcessModel  # noqa: E402
from lava.magma.core.model.py.ports import PyInPort, PyOutPort  # noqa: E402
from lava.magma.core.model.py.type import LavaPyType  # noqa: E402
from lava.magma.core.process.ports.ports import InPort, OutPort  # noqa: E402
from lava.magma.core.process.process import AbstractProcess  # noqa: E402
from lava.magma.core.resources import CPU  # noqa: E402
from lava.magma.core.sync.protocols.loihi_protocol import LoihiProtocol  # noqa: E402


class Relay(AbstractProcess):
    """Hands its input on; at step `at` it does what `fault` says: raise, sleep, exit, or build_error at once."""

    def __init__(self, fault: str = "none", at: int = 2, name: str | None = None) -> None:
        super().__init__(name=name, fault=fault, at=at)
        self.a_in = InPort(shape=(3,))
        self.a_out = OutPort(shape=(3,))


@implements(proc=Relay, protocol=LoihiProtocol)
@requires(CPU)
class PyRelay(PyLoihiProcessModel):
    a_in: PyInPort = LavaPyType(PyInPort.VEC_DENSE, np.int64)
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64)

    def __init__(self, proc_params) -> None:
        super().__init__(proc_params)
        if proc_params["fault"] == "build_error":
            raise ValueError("cannot be built")
        if proc_params["fault"] == "build_hang":
            time.sleep(600)

    def run_spk(self) -> None:
        data = self.a_in.recv()
        fault = self.proc_params["fault"] if self.time_step == self.proc_params["at"] else "none"
        if fault == "raise":
            raise ZeroDivisionError("a fault on purpose")
        if fault == "sleep":
            time.sleep(600)
        if fault == "exit":
            import os

            os._exit(7)
        self.a_out.send(data)


class Start(AbstractProcess):
    """Sends a constant."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.a_out = OutPort(shape=(3,))


@implements(proc=Start, protocol=LoihiProtocol)
@requires(CPU)
class PyStart(PyLoihiProcessModel):
    a_out: PyOutPort = LavaPyType(PyOutPort.VEC_DENSE, np.int64)

    def run_spk(self) -> None:
        self.a_out.send(np.arange(3))
