"""What a network costs: parameters, and FLOPs counted on a real forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .attention import explicit_attention
from .calibration import on_device_of
from .channels import evaluating
from .layers import layer_input, tensor_of


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(p.numel() for p in model.parameters())


def flop_count(model: nn.Module, inputs: tuple) -> int:
    """FLOPs of one forward pass on ``inputs`` (a tuple of arguments): 2 a multiply-add, matrix products and convolutions only.

    Attention is spelled out and recurrent layers are counted by their weights, as fused kernels hide from the counter.
    """
    counter = FlopCounterMode(display=False)
    with (
        evaluating(model),
        torch.no_grad(),
        explicit_attention(model),
        sdpa_kernel(SDPBackend.MATH),
        counter,
        _recurrent_flops(model, counter) as missed,
    ):
        model(*inputs)
    return counter.get_total_flops() + sum(missed)


@contextmanager
def _recurrent_flops(model: nn.Module, counter: FlopCounterMode) -> Iterator[list[int]]:
    """Inside, what each call of a recurrent layer costs beyond what the counter saw of it is added to the list."""
    missed: list[int] = []
    before: list[int] = []

    def start(module, args) -> None:
        before.append(counter.get_total_flops())

    def end(module, args, kwargs, output) -> None:
        steps = tensor_of(layer_input(args, kwargs)).numel() // module.input_size
        weights = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
        missed.append(2 * steps * weights - (counter.get_total_flops() - before.pop()))

    handles = []
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            handles += [module.register_forward_pre_hook(start), module.register_forward_hook(end, with_kwargs=True)]
    try:
        yield missed
    finally:
        for handle in handles:
            handle.remove()


class Savings:
    """What a network has saved against what it was when this was made. FLOPs are unknown (None) without inputs."""

    def __init__(self, model: nn.Module, inputs: tuple | None):
        self.inputs = inputs
        self._parameters, self._flops = parameter_count(model), self.flops(model)

    @property
    def knows_flops(self) -> bool:
        """Whether there were FLOPs to save."""
        return bool(self._flops)

    def flops(self, model: nn.Module) -> int | None:
        return None if self.inputs is None else flop_count(model, on_device_of(model, self.inputs))

    def parameter_reduction(self, model: nn.Module) -> float:
        """Fraction of the original parameters that is gone."""
        return 1 - parameter_count(model) / self._parameters

    def flops_reduction(self, model: nn.Module) -> float | None:
        """Fraction of the original FLOPs that is gone."""
        return 1 - self.flops(model) / self._flops if self.knows_flops else None
