r"""The five Stage-1 targets (App. F.4) on one micro-batch, as sums, and the training-only maps they need.

R is the rate of the neuron of the student's own module (Eq. app_teacher_spike_proxy): learned v_A, S_H's threshold.

EA    MSE(P_e(rate of S_E), E_T)
SAA   gamma MSE(A_S, R(A_T)) + (1 - gamma) MSE(A_S, A_T)          over causal, non-padding entries
SFA   gamma MSE(H_S, R(H_T)) + (1 - gamma) MSE(LN(P_h(H_S)), H_T)
STA   T^2 KL(teacher || student) of softened logits               HTA   cross-entropy with the next token
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spikeopd.config import Stage1Config
from spikeopd.contracts import EMBED_SITE
from spikeopd.losses import chunked, hard_token, head_map, layer_map, masked_square_error, soft_token
from spikeopd.methods.run import Objective
from spikeopd.methods.sparsity import RateTarget, count_spikes
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.models.neurons import rate_proxy
from spikeopd.models.teacher import TeacherOutput
from spikeopd.quality import layer_spikes

SITES = (EMBED_SITE, "a", "h")  # whose spikes the targets see
BRANCHES = ("EA", "SAA_rate", "SAA_cont", "SFA_rate", "SFA_cont", "STA", "HTA")


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
        wanted: Recorder | None = None,
    ) -> Tensor:
        """Sums of BRANCHES, [7], over all tokens of ids [batch, token] (windows of running text: no padding).

        wanted: a recorder of SITES and others, for a caller who reads more of the spikes.
        """
        config = student.config
        wanted = wanted or Recorder(SITES)
        features = student.model(ids, use_cache=False, recorder=wanted).last_hidden_state
        rates = {key: spikes.mean(0) for key, spikes in wanted.spikes.items() if key[1] in SITES}
        embedding = masked_square_error(self.embedding(rates[-1, EMBED_SITE]), teacher.embeddings)
        attention = [torch.zeros((), device=ids.device)] * 2
        feature = [torch.zeros((), device=ids.device)] * 2
        causal = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).tril()
        for layer, matched in enumerate(self.layers):
            a_teacher = teacher.attentions[matched][:, self.heads]
            proxy = rate_proxy(a_teacher, config.num_steps, map_threshold(student, layer), config.alpha)
            attention[0] = attention[0] + masked_square_error(rates[layer, "a"], proxy, causal)
            attention[1] = attention[1] + masked_square_error(rates[layer, "a"], a_teacher, causal)
            h_teacher, h = teacher.hidden[matched], rates[layer, "h"]
            narrow = h_teacher if self.same_width else h_teacher @ self.to_student
            s_h = student.model.layers[layer].neurons("h")
            driven = narrow if s_h.bias is None else narrow + s_h.bias
            proxy = rate_proxy(driven, config.num_steps, s_h.threshold, config.alpha)
            aligned = self.norm[layer](self.feature[layer](h))
            feature[0] = feature[0] + masked_square_error(h, proxy)
            feature[1] = feature[1] + masked_square_error(aligned, h_teacher)
        tokens = token_alignment(student.lm_head, teacher_head, features, teacher.features, ids, temperature, chunk)
        return torch.stack((embedding, *attention, *feature, *tokens))


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

    def sums(self, ids: Tensor, teacher: TeacherOutput, teacher_head: nn.Module) -> Tensor:
        return self.alignment.sums(self.student, ids, teacher, teacher_head, self.temperature, self.chunk)

    def sums_and_spikes(
        self, ids: Tensor, teacher: TeacherOutput, teacher_head: nn.Module, dial: RateTarget
    ) -> tuple[Tensor, Tensor]:
        """The same sums, and the spikes [1 + layers] that a rate target sees, in the graph."""
        seen = Recorder({*SITES, *dial.sites})
        sums = self.alignment.sums(self.student, ids, teacher, teacher_head, self.temperature, self.chunk, seen)
        return sums, layer_spikes(seen, dial.layers, dial.scope)

    def count_spikes(self, ids: Tensor, dial: RateTarget) -> Tensor:
        return count_spikes(self.student, ids, dial)


def token_alignment(
    student_head: nn.Module,
    teacher_head: nn.Module,
    student: Tensor,
    teacher: Tensor,
    ids: Tensor,
    temperature: float,
    chunk: int,
) -> Tensor:
    """(STA, HTA) sums over the positions that have a next token; logits exist one chunk at a time."""

    def part(q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
        logits = student_head(q).float()
        with torch.no_grad():
            target = teacher_head(p).float()
        return torch.stack((soft_token(logits, target, temperature), hard_token(logits, labels)))

    return chunked(part, chunk, student[:, :-1].flatten(0, 1), teacher[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


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
            options.lambda_soft,
            options.lambda_hard,
        ],
        dtype=torch.float64,
    )
