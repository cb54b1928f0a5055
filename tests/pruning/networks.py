"""Small networks for the laws, and the masked twin that surgery must equal."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn

from tnvp.pruning.compensation import compensated


def mlp(widths=(7, 11, 9, 4), activation=nn.ReLU, norm=False, dropout=0.0, bias=True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(a, b, bias=bias))
        if i < len(widths) - 2:
            layers += [nn.BatchNorm1d(b)] * norm + [activation()] + [nn.Dropout(dropout)] * (dropout > 0)
    return nn.Sequential(*layers)


def convnet() -> nn.Sequential:
    """Two convolutions without padding, batch norm, pooling, flatten, two linear layers; input [B, 3, 16, 16]."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(8 * 2 * 2, 10), nn.Tanh(), nn.Linear(10, 4),
    )  # fmt: skip


def stir(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random batch-norm statistics and affines, so that nothing is trivially 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight, module.bias):
                tensor.detach().add_(0.3 * torch.randn(tensor.shape, generator=generator).to(tensor))
            module.running_var.add_(torch.rand(module.running_var.shape, generator=generator).to(module.running_var))
    return model


def masked_twin(model: nn.Module, report, stand_ins) -> nn.Module:
    """A full-size copy of ``model`` (taken before the event) in which removed neurons read as zero and what stands in for
    them already sits in the consumers' weights and biases: what training the masked network means."""
    twin = copy.deepcopy(model)
    for (layer, side), kept in report.cuts.items():
        if side == "out":
            continue
        module = twin.get_submodule(layer)
        mask = torch.zeros(module.weight.shape[1], dtype=torch.bool)
        mask[kept] = True
        for name, tensor in compensated(module, stand_ins[layer]).items():
            if getattr(module, name) is None:
                setattr(module, name, nn.Parameter(tensor))
            else:
                getattr(module, name).detach().copy_(tensor)

        def hook(module, inputs, mask=mask):
            x = inputs[0]
            shape = [1] * x.dim()
            shape[1 if isinstance(module, nn.Conv2d) else -1] = len(mask)
            return (x * mask.to(x).reshape(shape),)

        module.register_forward_pre_hook(hook)
    return twin
