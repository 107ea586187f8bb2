r"""The Stage-1 targets (App. F.4) on one micro-batch, as sums, and the training-only maps they need.

R is the rate of the neuron of the student's own module (Eq. app_teacher_spike_proxy): learned v_A, S_H's threshold.

EA    MSE(P_e(rate of S_E), E_T)
SAA   gamma MSE(A_S, R(A_T)) + (1 - gamma) MSE(A_S, A_T)          over causal, non-padding entries
SFA   gamma MSE(H_S, R(H_T)) + (1 - gamma) MSE(LN(P_h(H_S)), H_T)
STA   T^2 KL(teacher || student) of softened logits               HTA   cross-entropy with the next token

and two that the paper does not have, off unless `stage1.lambda_stream` or `stage1.lambda_middle` is set
(docs/student.md):

RSA      MSE(norm(mean over steps of h_S), norm(h_T))             the residual streams behind each layer
RSA_mid  the same between attention and feed-forward layer
      norm: LayerNorm without gain and bias. The head reads h through one, so its scale is free. Needs equal widths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spikeopd.config import Stage1Config
from spikeopd.contracts import EMBED_SITE
from spikeopd.losses import (
    hard_token,
    head_map,
    layer_map,
    linear_sums,
    masked_square_error,
    soft_token,
    square_errors,
)
from spikeopd.methods.run import Objective
from spikeopd.methods.sparsity import RateTarget, count_spikes
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, OutputTable, Recorder
from spikeopd.models.neurons import rate_proxy
from spikeopd.models.teacher import TeacherOutput
from spikeopd.quality import layer_spikes

BRANCHES = ("EA", "SAA_rate", "SAA_cont", "SFA_rate", "SFA_cont", "RSA", "RSA_mid", "STA", "HTA")


@dataclass(frozen=True)
class TeacherShape:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int

    @staticmethod
    def of(config: Any) -> TeacherShape:
        """From the teacher's configuration, of whatever family."""
        return TeacherShape(config.hidden_size, config.num_hidden_layers, config.num_attention_heads)


class Alignment(nn.Module):
    """The five targets, with P_e, P_h and the LayerNorms of the continuous branches.

    P_e is always a learned map: rates lie in [0, 1] and embeddings do not, so the identity would press the embedding's
    firing rate towards zero. P_h is the identity for equal widths.
    """

    to_student: Tensor

    def __init__(self, student: BiSpikCLMConfig, teacher: TeacherShape) -> None:
        super().__init__()
        mine, theirs, layers = student.hidden_size, teacher.hidden_size, student.num_hidden_layers
        same = mine == theirs
        self.embedding = nn.Linear(mine, theirs)
        self.feature = nn.ModuleList(nn.Identity() if same else nn.Linear(mine, theirs) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(theirs) for _ in range(layers))
        # Teacher to student width for the rate branch: fixed, since a learned target could make itself trivial.
        projection = torch.eye(1) if same else torch.randn(theirs, mine) / theirs**0.5
        self.register_buffer("to_student", projection)
        self.same_width = same
        self.layers = layer_map(layers, teacher.num_hidden_layers)
        self.heads = head_map(student.num_attention_heads, teacher.num_attention_heads)

    def sums(
        self,
        student: BiSpikCLMForCausalLM,
        ids: Tensor,
        teacher: TeacherOutput,
        teacher_head: nn.Module,
        temperature: float,
        chunk: int,
        scale: Sequence[float],
        recorder: Recorder | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(sum_i scale_i s_i, s): s are the sums of BRANCHES, [9], over all tokens of ids [batch, token] (windows of
        running text: no padding), without gradient. A branch of scale 0 is not computed: its sum is 0.

        recorder: of sites that the caller wants to read besides.
        """
        use = dict(zip(BRANCHES, (value != 0 for value in scale), strict=True))
        recorder = recorder or Recorder(sites=())
        recorder.sites = {*(recorder.sites or ()), *((EMBED_SITE,) if use["EA"] else ())}
        recorder.maps = use["SAA_rate"] or use["SAA_cont"]
        recorder.observe = lambda layer, spikes: self.layer_terms(student, layer, spikes, teacher, scale[1:7])
        features = student.model(ids, use_cache=False, recorder=recorder).last_hidden_state
        loss, tokens = token_alignment(
            student.lm_head, teacher_head, features, teacher.features, ids, temperature, chunk, scale[7:]
        )
        layers = torch.stack(recorder.observed).sum(0)
        embedding = torch.zeros((), device=ids.device)
        if use["EA"]:
            rate = recorder.spikes[-1, EMBED_SITE].mean(0)
            embedding = masked_square_error(self.embedding(rate), teacher.embeddings)
        idle = () if use["EA"] else self.embedding.parameters()
        if not (use["SFA_rate"] or use["SFA_cont"]):
            idle = (*idle, *self.norm.parameters(), *self.feature.parameters())
        # Data parallelism wants every parameter in the graph, if only with zeros.
        loss = loss + layers[0] + scale[0] * embedding + sum(0.0 * parameter.sum() for parameter in idle)
        return loss, torch.cat((embedding.detach()[None], layers[1:].detach(), tokens))

    def layer_terms(
        self,
        student: BiSpikCLMForCausalLM,
        layer: int,
        spikes: Mapping[str, Tensor],
        teacher: TeacherOutput,
        scale: Sequence[float],
    ) -> Tensor:
        """[loss, SAA_rate, SAA_cont, SFA_rate, SFA_cont, RSA, RSA_mid] of one layer; only the first has a gradient.
        Called inside the block, so that no map outlives its layer, nor with gradient checkpointing its recomputation.
        """
        config, matched, block = student.config, self.layers[layer], student.model.layers[layer]
        total = torch.zeros(7, device=spikes["h"].device)
        if scale[0] or scale[1]:
            rate, a_teacher = spikes["map"], teacher.attentions[matched][:, self.heads]
            proxy = rate_proxy(a_teacher, config.num_steps, map_threshold(student, layer), config.alpha)
            causal = torch.ones(rate.shape[-2:], device=rate.device).tril()
            loss, sums = square_errors(rate, (proxy, a_teacher), scale[:2], causal)
            total = total + torch.cat((loss[None], sums, sums.new_zeros(4)))
        if scale[2] or scale[3]:
            h_teacher, h = teacher.hidden[matched], spikes["h"].mean(0)
            narrow = h_teacher if self.same_width else h_teacher @ self.to_student
            s_h = block.neurons("h")
            driven = narrow if s_h.bias is None else narrow + s_h.bias
            proxy = rate_proxy(driven, config.num_steps, s_h.threshold, config.alpha)
            rates, rate_sum = square_errors(h, (proxy,), scale[2:3])
            aligned = self.norm[layer](self.feature[layer](h))
            values, value_sum = square_errors(aligned, (h_teacher,), scale[3:4])
            zero = rate_sum.new_zeros(2)
            total = total + torch.cat(((rates + values)[None], zero, rate_sum, value_sum, zero))
        if scale[4]:
            loss, stream_sum = stream_error(spikes["stream"], teacher.stream(matched), scale[4:5])
            total = total + torch.cat((loss[None], loss.new_zeros(4), stream_sum, loss.new_zeros(1)))
        if scale[5]:
            loss, stream_sum = stream_error(spikes["middle"], teacher.middle[matched], scale[5:6])
            total = total + torch.cat((loss[None], loss.new_zeros(5), stream_sum))
        return total


def stream_error(mine: Tensor, theirs: Tensor, scale: Sequence[float]) -> tuple[Tensor, Tensor]:
    """RSA of one place: residual streams [time, batch, token, d] of the student, [batch, token, d] of the teacher."""
    width = mine.shape[-1:]
    mine, theirs = (nn.functional.layer_norm(stream, width) for stream in (mine.mean(0), theirs))
    return square_errors(mine, (theirs,), scale)


def map_threshold(student: BiSpikCLMForCausalLM, layer: int) -> Tensor:
    """v_A of each head, [head, 1, 1]: the learned threshold of S_A before its scaling by sqrt(d_h), in the unit of a
    map in [0, 1]. With the scaled one such a map would never fire.
    """
    config = student.config
    learned: Tensor = student.model.layers[layer].neurons("a").threshold
    return learned.detach() / math.sqrt(config.hidden_size // config.num_attention_heads)


class SpADObjective(Objective):
    """The student of Stage 1 with its alignment maps."""

    def __init__(self, student: BiSpikCLMForCausalLM, chunk: int, teacher: TeacherShape, temperature: float) -> None:
        super().__init__(student, chunk)
        self.alignment, self.temperature = Alignment(student.config, teacher), temperature

    def sums(
        self, ids: Tensor, teacher: TeacherOutput, teacher_head: nn.Module, scale: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        return self.alignment.sums(self.student, ids, teacher, teacher_head, self.temperature, self.chunk, scale)

    def sums_and_spikes(
        self, ids: Tensor, teacher: TeacherOutput, teacher_head: nn.Module, scale: Sequence[float], dial: RateTarget
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and the spikes [1 + layers] that a rate target sees, in the graph."""
        seen = Recorder(dial.sites)
        head, chunk = teacher_head, self.chunk
        loss, sums = self.alignment.sums(self.student, ids, teacher, head, self.temperature, chunk, scale, seen)
        return loss, sums, layer_spikes(seen, dial.layers, dial.scope)

    def count_spikes(self, ids: Tensor, dial: RateTarget) -> Tensor:
        return count_spikes(self.student, ids, dial)


def token_alignment(
    student_head: OutputTable,
    teacher_head: nn.Module,
    student: Tensor,
    teacher: Tensor,
    ids: Tensor,
    temperature: float,
    chunk: int,
    scale: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """(loss, (STA, HTA)) sums over the positions that have a next token; logits exist one chunk at a time."""
    soft, hard = scale

    def part(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
        zero = logits.new_zeros(())
        if soft:
            with torch.no_grad():
                target = teacher_head(p).float()
        return torch.stack(
            (soft_token(logits, target, temperature) if soft else zero, hard_token(logits, labels) if hard else zero)
        )

    affine = student_head.affine(student[:, :-1].flatten(0, 1))
    narrow = student_head.gradients == "rates"
    return linear_sums(part, scale, chunk, affine, teacher[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), narrow=narrow)


def branch_sizes(student: BiSpikCLMConfig, teacher: TeacherShape, rows: int, length: int) -> Tensor:
    """|Omega| of each branch for `rows` windows of `length` tokens: what the sums of BRANCHES are divided by."""
    tokens, layers = rows * length, student.num_hidden_layers
    pairs = rows * length * (length + 1) // 2 * layers * student.num_attention_heads
    return torch.tensor(
        [
            tokens * teacher.hidden_size,
            pairs,
            pairs,
            tokens * student.hidden_size * layers,
            tokens * teacher.hidden_size * layers,
            tokens * student.hidden_size * layers,
            tokens * student.hidden_size * layers,
            rows * (length - 1),
            rows * (length - 1),
        ],
        dtype=torch.float64,
    )


def branch_weights(options: Stage1Config) -> Tensor:
    """Outer weight times inner mixing coefficient of each branch (Eq. app_offline_weights)."""
    attn, feat = options.gamma_attn, options.gamma_feat
    return torch.tensor(
        [
            options.lambda_emb,
            options.lambda_attn * attn,
            options.lambda_attn * (1 - attn),
            options.lambda_feat * feat,
            options.lambda_feat * (1 - feat),
            options.lambda_stream,
            options.lambda_middle,
            options.lambda_soft,
            options.lambda_hard,
        ],
        dtype=torch.float64,
    )


def logged_branches(means: Tensor, weights: Tensor) -> dict[str, float]:
    """The branches that were computed: those with a weight."""
    found = zip(BRANCHES, means.tolist(), weights.tolist(), strict=True)
    return {name: value for name, value, weight in found if weight}
