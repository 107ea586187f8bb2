"""Two ways to run one Lava process for a test: its model alone without a runtime, or really, between stock processes.

The first takes the model as Lava's own compiler and builder make it and feeds its ports by hand: fast enough for
Hypothesis. The second shows that the same model works in Lava's runtime, connected to Lava's stock source and sink.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from neuro_sim.lava.compat import quiet_logging, require_lava

require_lava()

from lava.magma.core.run_conditions import RunSteps  # noqa: E402
from lava.magma.core.run_configs import Loihi2SimCfg  # noqa: E402
from lava.proc.dense.process import Dense  # noqa: E402, F401  (for the tests; here the import shim has run)
from lava.proc.io.sink import RingBuffer as Sink  # noqa: E402
from lava.proc.io.source import RingBuffer as Source  # noqa: E402

from neuro_sim.lava.runtime import start  # noqa: E402


class _Feed:
    def __init__(self, rows: np.ndarray) -> None:
        self._rows = iter(rows)

    def recv(self) -> np.ndarray:
        return next(self._rows).copy()


class _Catch:
    csp_ports = (None,)  # "somebody listens", so that reports are written

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def send(self, data: np.ndarray) -> None:
        self.sent.append(np.array(data))


def build_model(process, tag: str):
    """The process model as Lava builds it, without a runtime around it."""
    with quiet_logging():
        executable = process.compile(Loihi2SimCfg(select_tag=tag))
    return executable.proc_builders[process].build()


def drive(process, tag: str, inputs: Mapping[str, np.ndarray], steps: int) -> tuple[object, dict[str, np.ndarray]]:
    """Run the model alone. inputs: [steps, n] per in-port. Returns the model and what each out-port sent."""
    model = build_model(process, tag)
    for name, rows in inputs.items():
        setattr(model, name, _Feed(rows))
    catches = {port.name: _Catch() for port in process.out_ports}
    for name, catch in catches.items():
        setattr(model, name, catch)
    for _ in range(steps):
        model.time_step += 1
        model.run_spk()
    return model, {name: np.stack(catch.sent) if catch.sent else np.zeros(0) for name, catch in catches.items()}


def run_in_lava(process, tag: str, inputs: Mapping[str, np.ndarray], output: str, steps: int) -> np.ndarray:
    """Run the process in a real runtime between Lava's ring buffers; what came out of `output`, [steps, n]."""
    with quiet_logging():
        for name, rows in inputs.items():
            Source(data=rows.T.astype(np.int32 if tag == "fixed_pt" else float)).s_out.connect(getattr(process, name))
        port = getattr(process, output)
        sink = Sink(shape=port.shape, buffer=steps)
        port.connect(sink.a_in)
    runtime = start(process, Loihi2SimCfg(select_tag=tag), timeout=60)
    try:
        runtime.start(RunSteps(num_steps=steps))
        return sink.data.get().T
    finally:
        runtime.stop()
