"""What lowering cost: perplexity and token agreement of the student before and after, and shares of equal spikes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from export.reference import TorchReference
from export.verify import as_steps
from spikeopd import quality
from spikeopd.contracts import EMBED_SITE, Array, SpikeModel
from spikeopd.models.bispikclm import Recorder

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM


@torch.no_grad()
def compare(student: BiSpikCLMForCausalLM, lowered: SpikeModel, windows: Array) -> dict[str, Any]:
    """Both models on the same windows [n, length]; every token but a window's first is predicted."""
    reference = TorchReference(lowered)
    before = after = 0.0
    agree = predicted = equal = slots = 0
    sites = [
        site for site in lowered.shape.layer_sites if site != "a"
    ]  # the attention map grows with position; its effect is in r
    for window in windows:
        recorder = Recorder(sites=[EMBED_SITE, *sites])
        tokens = torch.from_numpy(window)
        logits = student(tokens[None], use_cache=False, recorder=recorder).logits[0].double().numpy()
        lowered_logits, trace = reference.run(window.tolist())
        before -= quality.log_likelihoods(logits[:-1], window[1:]).sum()
        after -= quality.log_likelihoods(lowered_logits[:-1], window[1:]).sum()
        agree += int((logits.argmax(-1) == lowered_logits.argmax(-1)).sum())
        predicted += len(window) - 1
        for key, spikes in recorder.spikes.items():
            mine = as_steps(spikes[:, 0], student.config)
            theirs = np.stack(trace.sites[key], 1)
            equal, slots = equal + int((mine == theirs).sum()), slots + mine.size
    tokens_seen = int(windows.size)
    return {
        "tokens": tokens_seen,
        "perplexity_student": quality.perplexity(before, max(predicted, 1)),
        "perplexity_lowered": quality.perplexity(after, max(predicted, 1)),
        "token_agreement": agree / tokens_seen,
        "spike_agreement": equal / slots,
    }
