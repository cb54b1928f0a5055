"""What a network costs: parameters, and FLOPs counted on a real forward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .attention import explicit_attention
from .calibration import on_device_of
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


class Savings:
    """What a network has saved against what it was when this was made. FLOPs are unknown (None) without inputs."""

    def __init__(self, model: nn.Module, inputs: tuple | None):
        self.inputs = inputs
        self._parameters, self._flops = parameter_count(model), self.flops(model)

    def flops(self, model: nn.Module) -> int | None:
        return None if self.inputs is None else flop_count(model, on_device_of(model, self.inputs))

    def parameter_reduction(self, model: nn.Module) -> float:
        """Fraction of the original parameters that is gone."""
        return 1 - parameter_count(model) / self._parameters

    def flops_reduction(self, model: nn.Module) -> float | None:
        """Fraction of the original FLOPs that is gone."""
        return 1 - self.flops(model) / self._flops if self._flops else None
