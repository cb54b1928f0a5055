"""The law that surgery must obey, for any network: rebuilt equals masked, the certificate agrees, training goes on.

The masked network is told in two ways. `replacing` lets each consumer read what stands in for removed neurons: the definition,
exact where consumers absorb constants. `folded_twin` lets it read zeros and folds the constants first: exact everywhere.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import tnvp
from tnvp.pruning import compensation as compensations
from tnvp.pruning.attention import explicit_attention
from tnvp.pruning.calibration import tensors_in
from tnvp.pruning.compensation import StandIn, compensated, constant_stand_in, replacing
from tnvp.pruning.layers import absorbs_constants

EXACT = 1e-8


class Net(nn.Module):
    """Layers by name and a forward: ``Net(lambda m, x: m.b(m.a(x)), a=…, b=…)``."""

    def __init__(self, run: Callable, **layers: nn.Module):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


class Net2(Net):
    """The same with two inputs."""

    def forward(self, x, y):
        return self.run(self, x, y)


def doubled(inputs) -> tuple:
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def prepared(build: Callable[[], nn.Module], inputs: tuple, seed: int = 4) -> nn.Module:
    """The network in float64 and eval mode; norms have random affines and the statistics of its own activations."""
    torch.manual_seed(seed)
    model = build().double()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    for parameter in model.parameters():  # a head of zeros or a scale of 1e-6 would hide all that happens before it
        if parameter.dim() > 1 and float(parameter.detach().std()) == 0:
            parameter.data.normal_(std=0.3)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None]
    if norms:
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            model.train()(*inputs)
        for norm in norms:
            norm.momentum = 0.1
    return model.eval()


def spy_on_stand_ins(monkeypatch) -> dict[str, StandIn]:
    """What stands in for removed neurons at the latest event."""
    used: dict[str, StandIn] = {}
    real = compensations.stand_ins

    def spy(*args):
        used.clear()
        used.update(real(*args))
        return used

    monkeypatch.setattr("tnvp.pruning.pruner.stand_ins", spy)
    return used


def folded_twin(model: nn.Module, stand_ins: dict[str, StandIn]):
    """``model`` (full size) once constants are folded; call it inside the context that this returns beside it."""
    twin = copy.deepcopy(model)
    zeros = {}
    for name, stand_in in stand_ins.items():
        module = twin.get_submodule(name)
        for tensor, value in compensated(module, stand_in).items():
            setattr(module, tensor, nn.Parameter(value))
        zeros[name] = constant_stand_in(torch.zeros(len(stand_in.removed) + len(stand_in.kept)), stand_in.kept)
    return twin, replacing(twin, zeros)


def difference(found, expected) -> float:
    """‖found − expected‖ / ‖expected‖ over all floating-point tensors of two outputs."""
    ours, theirs = tensors_in(found), tensors_in(expected)
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    change = sum(float((a - b).detach().double().square().sum()) for a, b in zip(ours, theirs, strict=True))
    return (change / max(sum(float(b.detach().double().square().sum()) for b in theirs), 1e-300)) ** 0.5


def calibration(inputs: tuple) -> list:
    return [(inputs, None)]


def pruned_equals_masked(pruner: tnvp.Pruner, used: dict[str, StandIn], inputs: tuple, **request):
    """Prune once and hold the network against both masked ones, and the certificate against what it says."""
    model = pruner.model
    before = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*can't take a constant into the bias exactly")
        report = pruner.prune(calibration=calibration(inputs), **request)
    assert used.keys() == {layer for layer, side in report.cuts if side == "in"}
    with torch.no_grad():
        with explicit_attention(model):  # torch's fused encoders answer otherwise where tokens are padded
            found = model(*inputs)
        twin, masked = folded_twin(before, used)
        with masked:
            assert difference(found, twin(*inputs)) < EXACT
        exact = all(absorbs_constants(before.get_submodule(c)) or s.is_nothing for c, s in used.items())
        if exact:
            with replacing(before, used):
                assert difference(found, before(*inputs)) < EXACT
    if exact:
        assert abs(report.certificate.predicted - report.certificate.measured) < 1e-6
        assert report.certificate.border_part < 1e-7
        assert report.certificate.disagreement == ""
    return report


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple) -> None:
    """One step in train mode moves every parameter that has a gradient, and all prunable layers' have one."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = sum((x - 0.5).square().mean() for x in tensors_in(model(*inputs)) if x.requires_grad)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if (p.detach() != old[name]).any()}
    for name, p in model.named_parameters():
        if (
            p.grad is not None and p.dtype == torch.float64 and p.grad.abs().max() > 1e-12
        ):  # others round small steps away
            assert name in moved, f"{name} did not move"
    assert moved
    assert tnvp.stale_leaves(model) == []
    model.eval()
