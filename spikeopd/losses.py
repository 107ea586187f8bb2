r"""Every loss of the paper as a pure function that returns a sum; the loop divides once per optimizer step.

Hence splitting a batch into micro-batches or over ranks cannot change the gradient. Symbols follow the paper:
p teacher, q student, r reference; `mask` is 1 on valid positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# --- between distributions; logits [..., vocab] -> sum over the leading positions ------------------------------------


def forward_kl(student: Tensor, target: Tensor) -> Tensor:
    """sum KL(target || student), over the complete vocabulary (Eq. app_opd). Gradient in the logits: q - p."""
    return _kl(student, target, 1.0)


class _ForwardKL(torch.autograd.Function):
    """T^2 sum KL of softened distributions; keeps p alone of all that autograd would keep."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, target: Tensor, temperature: float) -> Tensor:
        log_p = _softened(target, temperature).log_softmax(-1)
        p = log_p.exp()
        ctx.save_for_backward(student, p)
        ctx.temperature = temperature
        gap = log_p.sub_(_softened(student, temperature).log_softmax(-1))
        return temperature**2 * torch.dot(p.flatten(), gap.flatten())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        student, p = ctx.saved_tensors
        return (grad * ctx.temperature) * (_softened(student, ctx.temperature).softmax(-1) - p), None, None


def _kl(student: Tensor, target: Tensor, temperature: float) -> Tensor:
    value: Tensor = _ForwardKL.apply(student, target.detach(), temperature)  # type: ignore[no-untyped-call]
    return value


def _softened(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def reverse_kl(student: Tensor, target: Tensor) -> Tensor:
    """sum KL(student || target) (Eq. app_ref). Gradient in the logits: q (log q/r - KL)."""
    return F.kl_div(target.log_softmax(-1), student.log_softmax(-1), log_target=True, reduction="sum")


def jsd(student: Tensor, target: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence (GKD): b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q."""
    log_q, log_p = student.log_softmax(-1), target.log_softmax(-1)
    weights = torch.tensor([beta, 1 - beta], dtype=log_q.dtype, device=log_q.device).log()
    log_m = torch.logsumexp(torch.stack((log_p + weights[0], log_q + weights[1])), 0)
    left = F.kl_div(log_m, log_p, log_target=True, reduction="sum")
    right = F.kl_div(log_m, log_q, log_target=True, reduction="sum")
    return beta * left + (1 - beta) * right


def soft_token(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """STA (Eq. app_token_alignment): T^2 sum KL of the softened distributions. |gradient| <= sqrt(2) T a position."""
    return _kl(student, teacher, temperature)


def hard_token(student: Tensor, labels: Tensor) -> Tensor:
    """HTA: sum of - log q(x_{t+1}); labels [...] of token ids."""
    return F.cross_entropy(student.flatten(0, -2), labels.flatten(), reduction="sum")


# --- between tensors -------------------------------------------------------------------------------------------------


def masked_square_error(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Numerator of MSE over the valid coordinates (Eq. app_masked_mse)."""
    error = (x - y).square()
    return error.sum() if mask is None else (error * mask).sum()


def square_errors(
    x: Tensor, targets: Sequence[Tensor], weights: Sequence[float], mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum_i weights_i e_i, e): e_i is `masked_square_error` to target i. Only the first has a gradient, made at once:
    one tensor of x's size is kept for the backward pass, whatever the number of targets. Weight 0: not computed.
    """
    loss, errors = _SquareErrors.apply(x, mask, tuple(weights), *targets)  # type: ignore[no-untyped-call]
    return loss, errors


class _SquareErrors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, weights: tuple[float, ...], *targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        slope = torch.zeros_like(x)
        errors = []
        for weight, target in zip(weights, targets, strict=True):
            if not weight:
                errors.append(x.new_zeros(()))
                continue
            gap = x - target if mask is None else (x - target).mul_(mask)
            errors.append(gap.square().sum())
            slope.add_(gap, alpha=2 * weight)
        ctx.save_for_backward(slope)
        found = torch.stack(errors)
        ctx.mark_non_differentiable(found)
        return (found * torch.tensor(weights, dtype=found.dtype, device=found.device)).sum(), found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * grad, *[None] * (len(ctx.needs_input_grad) - 1)


def spike_loss(
    rates: Tensor, reference: Tensor, rate_min: float = 0.01, rate_max: float = 0.58, rho: float = 1.0
) -> Tensor:
    r"""L_spk (Eq. app_spike): mean over monitored layers of [r_min - r]_+^2 + [r - r_max]_+^2 + rho (r - r_ref)^2.

    rates, reference: [layers], each the mean over the *whole* batch. The loss is not linear in the rate, so a split
    batch needs the whole batch's rates first: see `spike_coefficients`.
    """
    low, high = (rate_min - rates).clamp(min=0), (rates - rate_max).clamp(min=0)
    return (low.square() + high.square() + rho * (rates - reference).square()).mean()


def spike_coefficients(
    rates: Tensor, reference: Tensor, rate_min: float, rate_max: float, rho: float
) -> tuple[Tensor, Tensor]:
    """(L_spk, dL_spk/dr_l): the chain rule cut at the rates, so that any part of a batch can go backward alone."""
    with torch.enable_grad():
        leaf = rates.detach().requires_grad_(True)
        loss = spike_loss(leaf, reference, rate_min, rate_max, rho)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


# --- chunks ----------------------------------------------------------------------------------------------------------


def chunked(function: Callable[..., Tensor], chunk: int, *tensors: Tensor) -> Tensor:
    """sum of function(*parts) over chunks of the first axis; nothing inside a chunk is kept for the backward pass.

    With `function` taking features through the output table, the memory for logits is chunk x vocabulary,
    whatever the batch.
    """
    total: Tensor | None = None
    for parts in zip(*(torch.split(tensor, chunk) for tensor in tensors), strict=True):
        if torch.is_grad_enabled():
            value = checkpoint(function, *parts, use_reentrant=False, preserve_rng_state=False)
        else:
            value = function(*parts)
        total = value if total is None else total + value
    assert total is not None, "chunked() needs at least one row"
    return total


def linear_sums(
    function: Callable[..., Tensor],
    weights: Sequence[float],
    chunk: int,
    affine: tuple[Tensor, Tensor, Tensor],
    *tensors: Tensor,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum_i weights_i s_i, s): sums s = function(logits, *parts) of logits = x W^T + b, chunk by chunk.

    affine: features x, W, b. Each chunk's logits go forward and backward at once and only then the next ones are made:
    nothing is computed twice, and one gradient of W collects what every chunk adds. Only the first result has a
    gradient, which is why the weights must be known here.

    narrow: the products of the gradients in bfloat16.
    """
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in affine)
    loss, sums = _LinearSums.apply(  # type: ignore[no-untyped-call]
        *affine, function, tuple(weights), chunk, wanted, narrow, *tensors
    )
    return loss, sums


class _LinearSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        function: Callable[..., Tensor],
        weights: tuple[float, ...],
        chunk: int,
        wanted: bool,
        narrow: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        grads = [torch.zeros_like(x) for x in (features, weight, bias)] if wanted else []
        total: Tensor | None = None
        for start in range(0, len(features), chunk):
            x, parts = features[start : start + chunk], [tensor[start : start + chunk] for tensor in tensors]
            logits = F.linear(x, weight, bias)
            with torch.enable_grad():
                leaf = logits.detach().float() if logits.dtype != torch.float64 else logits.detach()
                sums = function(leaf.requires_grad_(wanted), *parts)
                scale = torch.tensor(weights, dtype=sums.dtype, device=sums.device)
                # Without soft and hard labels no sum depends on the logits: their gradients stay 0.
                slope = (
                    torch.autograd.grad((sums * scale).sum(), leaf)[0].to(logits.dtype) if sums.requires_grad else None
                )
            if slope is None:
                pass
            elif slope.dtype == weight.dtype == x.dtype and not narrow:
                torch.mm(slope, weight, out=grads[0][start : start + chunk])
                grads[1].addmm_(slope.t(), x)
                grads[2].add_(slope.sum(0))
            else:  # under autocast: products in its precision, sums over chunks in the parameters'
                grads[2].add_(slope.sum(0))
                slope = slope.to(torch.bfloat16 if narrow else slope.dtype)
                grads[0][start : start + chunk] = slope @ weight.to(slope.dtype)
                grads[1].add_(slope.t() @ x.to(slope.dtype))
            total = sums.detach() if total is None else total + sums.detach()
        assert total is not None, "linear_sums() needs at least one row"
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(total)
        return (total * torch.tensor(weights, dtype=total.dtype, device=total.device)).sum(), total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        used = (
            x.mul_(grad) if need else None for x, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return (*used, *[None] * (len(ctx.needs_input_grad) - 3))


# --- maps between unequal shapes -------------------------------------------------------------------------------------


def layer_map(student_layers: int, teacher_layers: int) -> list[int]:
    """pi(l), 0-based: identity for equal depths, otherwise uniform skipping that ends at the last teacher layer.

    A student deeper than its teacher repeats teacher layers.
    """
    return [max(0, round((layer + 1) * teacher_layers / student_layers) - 1) for layer in range(student_layers)]


def head_map(student_heads: int, teacher_heads: int) -> list[int]:
    """chi(a), 0-based: identity for equal counts, otherwise evenly spread."""
    return [head * teacher_heads // student_heads for head in range(student_heads)]
