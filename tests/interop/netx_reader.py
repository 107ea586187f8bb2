"""Runs inside the lava-dl environment: load a netx file, run it in Loihi fixed point, save the spikes.

python netx_reader.py FILE.h5 inputs.npy outputs.npz
"""

from __future__ import annotations

import sys
import types

import numpy as np


def import_lava() -> None:
    """Lava 0.10 on Python 3.11, and lava-dl without its object detection (docs/lava.md says why)."""
    import dataclasses

    original = dataclasses.dataclass

    def hashable(cls=None, /, **options):
        def wrap(kind):
            if kind.__module__.startswith("lava.") and options.get("eq", True) and "__hash__" not in vars(kind):
                kind.__hash__ = object.__hash__
            return original(kind, **options)

        return wrap if cls is None else wrap(cls)

    dataclasses.dataclass = hashable
    try:
        import lava.magma.compiler.var_model  # noqa: F401
    finally:
        dataclasses.dataclass = original
    sys.modules["lava.lib.dl.slayer.object_detection"] = types.ModuleType("lava.lib.dl.slayer.object_detection")


def main(path: str, given: str, wanted: str) -> None:
    import_lava()
    from lava.lib.dl import netx
    from lava.magma.core.run_conditions import RunSteps
    from lava.magma.core.run_configs import Loihi2SimCfg
    from lava.proc.io.sink import RingBuffer as Sink
    from lava.proc.io.source import RingBuffer as Source

    spikes = np.load(given).astype(np.int32)  # [steps, n]
    net = netx.hdf5.Network(net_config=path)
    steps = spikes.shape[0] + 2 * len(net.layers)
    padded = np.zeros((spikes.shape[1], steps), np.int32)
    padded[:, : spikes.shape[0]] = spikes.T
    source, sink = Source(data=padded), Sink(shape=net.out.shape, buffer=steps)
    source.s_out.connect(net.inp)
    net.out.connect(sink.a_in)
    sink.run(condition=RunSteps(num_steps=steps), run_cfg=Loihi2SimCfg(select_tag="fixed_pt"))
    out = sink.data.get()
    sink.stop()
    np.savez(wanted, out=out, layers=len(net.layers))


if __name__ == "__main__":
    main(*sys.argv[1:])
