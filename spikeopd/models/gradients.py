r"""How the backward pass of a student's blocks is computed (`train.gradients`); the forward pass is the same for all.

fp32    each step's gradient, in float32
bf16    the same; products round both factors to bfloat16 and add in float32
rates   each neuron passes on the mean over its steps, dL/dI[t] = mean of a[1..T_s] (a: neurons.py). What lies
        between neurons is linear, so with means g and s of slopes and spikes dX = g W and dW = T_s g^T s: a T_s-th
        of the work and of the memory traffic. Products in bfloat16. (Rate-based backpropagation: Yu et al.,
        NeurIPS 2024.)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Gradients = Literal["fp32", "bf16", "rates"]


def kind(gradients: Gradients) -> torch.dtype:
    """Of the factors of products."""
    return torch.float32 if gradients == "fp32" else torch.bfloat16


def over_steps(grad: Tensor) -> Tensor:
    """Mean over the steps of a gradient [time, ...], as [1, ...]; free where it is the same at each step."""
    return grad[:1] if grad.stride(0) == 0 else grad.mean(0, keepdim=True)
