"""What a network costs: parameters, and FLOPs counted on a real forward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .attention import explicit_attention
from .channels import evaluating


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(p.numel() for p in model.parameters())


def flop_count(model: nn.Module, inputs: tuple) -> int:
    """FLOPs of one forward pass on ``inputs`` (a tuple of arguments): 2 a multiply-add, matrix products and convolutions only.

    Attention is spelled out, as fused kernels hide from the counter.
    """
    counter = FlopCounterMode(display=False)
    with evaluating(model), torch.no_grad(), explicit_attention(model), sdpa_kernel(SDPBackend.MATH), counter:
        model(*inputs)
    return counter.get_total_flops()
