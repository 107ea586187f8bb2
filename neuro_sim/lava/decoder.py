"""Decode with Lava: compile once, then run num_steps Lava time steps for each token."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from neuro_sim.counting import EventCounter
from neuro_sim.graded import refuse_graded
from neuro_sim.lava.compat import quiet_logging, require_lava
from neuro_sim.lava.precision import float_twin
from spikeopd.contracts import EMBED_SITE, Activity, SpikeModel, SpikeTrace, head_logits
from spikeopd.errors import InputError

Array = NDArray[Any]
TAGS = {"fixed": "fixed_pt", "float": "floating_pt"}


class LavaDecoder:
    """Same interface as DenseDecoder, run by Lava. Use it as a context manager, or call `close`.

    precision    "fixed": bit-accurate integers. "float": float32; an integer model is run as its float twin
    granularity  "fused": one process per layer. "graph": one process per part, to look at; slow to start and to run
    timeout      seconds one token may take before Lava counts as hanging
    """

    def __init__(
        self,
        model: SpikeModel,
        precision: Literal["fixed", "float"] = "fixed",
        granularity: Literal["fused", "graph"] = "fused",
        timeout: float = 60.0,
        trace: SpikeTrace | None = None,
    ) -> None:
        if model.shape.graded:
            refuse_graded("lava")
        if precision not in TAGS:
            raise InputError(f"precision {precision!r} is not known to Lava; choose fixed or float")
        if granularity not in ("fused", "graph"):
            raise InputError(f"granularity {granularity!r} is not known; choose fused or graph")
        if precision == "fixed" and not model.integer:
            raise InputError("this model is float32: it has no fixed-point form; choose precision float")
        require_lava()
        from lava.magma.core.run_configs import Loihi2SimCfg

        from neuro_sim.lava import compiled, runtime
        from neuro_sim.lava.processes.network import SpikingDecoder

        self.model = model if precision == "fixed" else float_twin(model)
        self.trace = trace
        self._head = _HostHead(self.model)
        self._counter = EventCounter(self.model)
        if (precision, granularity) == ("fixed", "fused"):
            compiled.warm_up()  # before the fork, so that every process inherits the code
        with quiet_logging(), runtime.unregistered():
            self.network = SpikingDecoder(model=self.model, reports=True)
            config = Loihi2SimCfg(select_tag=TAGS[precision], select_sub_proc_model=granularity == "graph")
            self._runtime = runtime.start(self.network, config, timeout)
        weakref.finalize(self, self._runtime.stop)  # for a program that forgets to close
        self._injector, self._readout = self.network.procs.injector, self.network.procs.readout
        embed = self.network.procs.s_embed
        self._reports: list[tuple[int, tuple[str, ...], Any, Any]] = [
            (-1, (EMBED_SITE,), embed.report, embed.proc_params["layout"])
        ]
        for index, block in enumerate(self.network.blocks()):
            self._reports += [(index, *report) for report in block.site_reports()]

    @property
    def position(self) -> int:
        """Tokens decoded so far in this sequence."""
        return self._counter.position

    @property
    def process_names(self) -> list[str]:
        """Names of the operating-system processes that Lava runs for this network."""
        return list(self._runtime.process_names)

    def reset(self) -> None:
        """Forget the sequence."""
        self._runtime.check_open()
        if self.position:
            for block in self.network.blocks():
                block.position.set(np.zeros(1))
            self._counter.reset()

    def step(self, token: int) -> tuple[Array, Activity]:
        """Feed one token; return its logits (float64 [vocab]) and the events it caused, counted from its spikes."""
        from lava.magma.core.run_conditions import RunSteps

        shape = self.model.shape
        if not 0 <= token < shape.vocab_size:
            raise InputError(f"token {token} is outside the vocabulary of {shape.vocab_size}")
        if self.position >= shape.max_position_embeddings:
            raise InputError(f"the context is full: {self.position} tokens is this model's limit")
        self._runtime.check_open()
        self._injector.send(self.model.embedding.current(token, self.position))
        self._runtime.start(RunSteps(num_steps=shape.num_steps))
        spikes, saturations = self._read_reports()
        logits = self._head.logits(self._readout.receive())
        if self.trace is not None:
            for (layer, site), fired in spikes.items():
                self.trace.add(layer, site, fired.copy())  # a view would keep the whole report
            self.trace.tokens.append(token)
        return logits, self._counter.count(spikes, saturations)

    def _read_reports(self) -> tuple[dict[tuple[int, str], Array], dict[tuple[int, str], Array]]:
        shape = self.model.shape
        spikes, saturations = {}, {}
        for layer, sites, port, layout in self._reports:
            message = port.external_pipe_csp_recv_port.recv()
            for site, (fired, saturated) in zip(sites, layout.unpack(message), strict=True):
                if site == "a":  # the report has room for a full cache
                    maps = fired.reshape(shape.num_steps, shape.num_attention_heads, shape.max_position_embeddings)
                    fired = maps[:, :, : self.position + 1].reshape(shape.num_steps, -1)
                spikes[layer, site], saturations[layer, site] = fired, saturated
        return spikes, saturations

    def close(self) -> None:
        """End the Lava processes. Safe to call at any time and more than once."""
        self._runtime.stop()

    def __enter__(self) -> LavaDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _HostHead:
    """What the readout summed to logits, on the host.

    float64 products of spike counts are exact (far below 2**53); sums of the residual stream stay integers.
    """

    def __init__(self, model: SpikeModel) -> None:
        self.model = model
        head, whole = model.head, model.integer and model.shape.readout == "residual"
        self._rows: Array | None = None  # None: the identity
        if head.gamma is not None:
            self._rows = model.embedding.table.T.astype(np.float64) * head.gamma[:, None]
        elif head.project_out is not None:
            self._rows = head.project_out.astype(np.int64 if whole else np.float64)
        self._sums = 1.0 if self._rows is None else self._rows.sum(0)

    def logits(self, counts: Array) -> Array:
        accumulated = counts if self._rows is None else counts @ self._rows
        return head_logits(self.model, counts, accumulated, self._sums)
