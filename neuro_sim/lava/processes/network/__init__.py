"""SpikingDecoder: the whole network as one hierarchical process."""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

from lava.magma.core.decorator import implements
from lava.magma.core.model.sub.model import AbstractSubProcessModel
from lava.magma.core.process.process import AbstractProcess
from lava.magma.core.sync.protocols.loihi_protocol import LoihiProtocol

from neuro_sim.lava.processes.block import REPORTS_IN_FLIGHT, SpikingBlock
from neuro_sim.lava.processes.host import EmbeddingInjector, RateReadout, ResidualReadout
from neuro_sim.lava.processes.neuron import SubtractiveLIF
from spikeopd.contracts import SpikeModel


class SpikingDecoder(AbstractProcess):
    """Embedding injector, S_embed, the layers in a chain, the readout: run num_steps steps for each token.

    Parameters: model (spikeopd.contracts.SpikeModel), reports (as for SpikingBlock). No ports and no Vars of its own:
    after compilation `procs.injector.send(current)` and `procs.readout.receive()` are the way in and out, and
    `blocks()` lists the layers.
    """

    def __init__(self, *, model: SpikeModel, reports: bool = False, name: str | None = "network") -> None:
        super().__init__(name=name, model=model, reports=reports)

    def blocks(self) -> list[SpikingBlock]:
        """The layers in order, after compilation."""
        model: SpikeModel = self.proc_params["model"]
        return [getattr(self.procs, f"layer{index}") for index in range(len(model.layers))]


@implements(proc=SpikingDecoder, protocol=LoihiProtocol)
class DecoderGraph(AbstractSubProcessModel):
    """The only model there is: whether a layer is fused or a graph is decided layer by layer."""

    def __init__(self, proc: SpikingDecoder) -> None:
        model: SpikeModel = proc.proc_params["model"]
        reports: bool = proc.proc_params["reports"]
        steps, d = model.shape.num_steps, (model.shape.hidden_size,)
        self.injector = EmbeddingInjector(shape=d, num_steps=steps, name="injector")
        site = model.embed_site
        self.s_embed = SubtractiveLIF(
            threshold=site.threshold,
            bias=site.bias,
            shift=site.shift,
            decay=model.decay,
            num_steps=steps,
            name="s_embed",
        )
        if reports:
            self.s_embed.report.flag_external_pipe(buffer_size=REPORTS_IN_FLIGHT)
        self.injector.a_out.connect(self.s_embed.a_in)
        x, h = self.s_embed.s_out, self.injector.a_out
        for index, layer in enumerate(model.layers):
            block = SpikingBlock(
                layer=layer, shape=model.shape, decay=model.decay, reports=reports, name=f"layer{index}"
            )
            if reports:  # heard only if the fused model is chosen; the parts of a graph have ports of their own
                block.report.flag_external_pipe(buffer_size=REPORTS_IN_FLIGHT)
            setattr(self, f"layer{index}", block)
            x.connect(block.x_in)
            h.connect(block.h_in)
            x, h = block.x_out, block.h_out
        if model.shape.readout == "rate":
            self.readout = RateReadout(shape=d, num_steps=steps, name="readout")
            x.connect(self.readout.s_in)
        else:
            self.readout = ResidualReadout(shape=d, num_steps=steps, name="readout")
            h.connect(self.readout.h_in)
