r"""Output-policy mismatch and internal spiking-dynamics drift on paired prefixes (App. B, diagnostic definitions).

    kappa  KL(teacher || student) at each prompt and position
    G_c(t)  mean over prompts of kappa_self - kappa_corp
    D_spk(c, t)  mean over prompts and layers of |r_self - r_corp|, with r = spikes / (T_s N_l)
    G_H(c)  hidden vectors averaged over time *first*, then |self - corp|; mean over coordinates, layers, positions
    D_U(c)  membrane distance at *each step*, then the mean over steps, coordinates, layers, positions

All L layers count alike. H is the layer's output spikes, U the membrane of the neurons that fire them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spikeopd.diagnostics.prefixes import PrefixBank
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.quality import rate_sites, rate_slots, teacher_kl

Array = NDArray[np.float64]
HIDDEN = "h"
DISPLAY = 1e4  # D_spk is plotted times 10^4


@dataclass(frozen=True)
class Paired:
    """One checkpoint on the bank, before any average over prompts: kappas [N, K], the others [N, K, L]."""

    kappa_self: Array
    kappa_corp: Array
    rate_self: Array
    rate_corp: Array
    hidden: Array  # g^H
    membrane: Array  # mean over tau and coordinates of |U_self - U_corp|


# --- definitions -----------------------------------------------------------------------------------------------------


def hidden_discrepancy(h_self: Tensor, h_corp: Tensor) -> Tensor:
    """g^H [n, K] from H [T_s, n, K, d]: time average, then absolute difference, then the mean over coordinates."""
    return (h_self.mean(0) - h_corp.mean(0)).abs().mean(-1)


def membrane_discrepancy(u_self: Tensor, u_corp: Tensor) -> Tensor:
    """[n, K] from U [T_s, n, K, d]: absolute difference at each step, then the mean over coordinates and steps."""
    return (u_self - u_corp).abs().mean((0, -1))


def prefix_gap(paired: Paired) -> Array:
    """G_c(t), [K]."""
    gap: Array = (paired.kappa_self - paired.kappa_corp).mean(0)
    return gap


def spike_drift(paired: Paired) -> Array:
    """D_spk(c, t), [K]."""
    drift: Array = np.abs(paired.rate_self - paired.rate_corp).mean((0, 2))
    return drift


def summary(paired: Paired) -> dict[str, Any]:
    """Curves over t and the checkpoint-level numbers."""
    gap, drift = prefix_gap(paired), spike_drift(paired)
    return {
        "kappa_self": paired.kappa_self.mean(0).tolist(),
        "kappa_corp": paired.kappa_corp.mean(0).tolist(),
        "prefix_gap": gap.tolist(),
        "spike_drift": drift.tolist(),
        "mean_kappa_self": float(paired.kappa_self.mean()),
        "mean_kappa_corp": float(paired.kappa_corp.mean()),
        "mean_prefix_gap": float(gap.mean()),
        "last_prefix_gap": float(gap[-1]),
        "mean_spike_drift": float(drift.mean()),
        "hidden_gap": float(paired.hidden.mean()),
        "membrane_drift": float(paired.membrane.mean()),
        "rate_self": float(paired.rate_self.mean()),
        "rate_corp": float(paired.rate_corp.mean()),
        "standard_errors": {name: standard_error(value).tolist() for name, value in by_prompt(paired).items()},
    }


def by_prompt(paired: Paired) -> dict[str, Array]:
    """What `summary` averages, of each prompt: curves [N, K], numbers [N]."""
    return {
        "kappa_self": paired.kappa_self,
        "kappa_corp": paired.kappa_corp,
        "prefix_gap": paired.kappa_self - paired.kappa_corp,
        "spike_drift": np.abs(paired.rate_self - paired.rate_corp).mean(2),
        "hidden_gap": paired.hidden.mean((1, 2)),
        "membrane_drift": paired.membrane.mean((1, 2)),
    }


def standard_error(values: Array) -> Array:
    """Standard error of the mean over prompts (the first axis); 0 of a single one."""
    count = len(values)
    error: Array = np.asarray(values.std(0, ddof=1) / np.sqrt(count) if count > 1 else np.zeros(values.shape[1:]))
    return error


def spike_improvement(offline: Paired, method: Paired) -> Array:
    """Delta_spk(t) = D_spk(offline, t) - D_spk(method, t), [K]; positive where the method drifts less."""
    return spike_drift(offline) - spike_drift(method)


# --- measuring -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def replay(
    student: BiSpikCLMForCausalLM, teacher: PreTrainedModel, bank: PrefixBank, rows: int = 16, chunk: int = 256
) -> Paired:
    """Feed both sources of the bank through student and teacher; nothing is sampled."""
    student.train(False)
    found = []
    for at in range(0, len(bank.prompts), rows):
        sides = [
            _observe(student, teacher, torch.from_numpy(bank.inputs(source)[at : at + rows]), bank.length, chunk)
            for source in ("self", "corp")
        ]
        (kappa_self, rate_self, h_self, u_self), (kappa_corp, rate_corp, h_corp, u_corp) = sides
        hidden = torch.stack([hidden_discrepancy(a, b) for a, b in zip(h_self, h_corp, strict=True)], -1)
        membrane = torch.stack([membrane_discrepancy(a, b) for a, b in zip(u_self, u_corp, strict=True)], -1)
        found.append((kappa_self, kappa_corp, rate_self, rate_corp, hidden, membrane))
    arrays = [torch.cat(parts).double().cpu().numpy() for parts in zip(*found, strict=True)]
    return Paired(**dict(zip((field.name for field in fields(Paired)), arrays, strict=True)))


def _observe(
    student: BiSpikCLMForCausalLM, teacher: PreTrainedModel, ids: Tensor, k: int, chunk: int
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """kappa [n, K], rates [n, K, L], then H and U of each layer [T_s, n, K, d], at the last K positions."""
    ids = ids.to(student.device)
    layers, sites = range(student.config.num_hidden_layers), rate_sites(student.config, "all")
    recorder = Recorder(sites, membranes_of=(HIDDEN,), tokens=slice(-k, None))
    features = student.model(ids, use_cache=False, recorder=recorder).last_hidden_state[:, -k:]
    target, head = run_teacher(teacher, ids, internals=False).features[:, -k:], output_table(teacher)
    pairs = zip(*(torch.split(part.flatten(0, 1), chunk) for part in (features, target)), strict=True)
    kappa = torch.cat([teacher_kl(student.lm_head(q).float(), head(p).float()) for q, p in pairs])
    slots = rate_slots(student.config, "all")
    rates = [
        torch.stack([recorder.spikes[layer, site].sum((0, 3)) for site in sites]).sum(0) / slots for layer in layers
    ]
    hidden = [recorder.spikes[layer, HIDDEN] for layer in layers]
    return (
        kappa.view(len(ids), k),
        torch.stack(rates, -1),
        hidden,
        [recorder.membranes[layer, HIDDEN] for layer in layers],
    )
