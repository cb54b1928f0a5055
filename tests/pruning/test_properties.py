"""The law on random networks: any widths, depths, activations, norms, residuals, concatenations, sparsities, optimizers."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tnvp

from .law import prepared, pruned_equals_masked, spy_on_stand_ins, trains

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.ELU, nn.Hardswish, nn.PReLU)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.001),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.001, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
}


@dataclass(frozen=True)
class Layer:
    """One step of a random network: it follows the last one, or is added to it, joined to it, or gated by it."""

    width: int
    activation: type
    norm: str
    bias: bool
    shape: str  # "plain", "residual", "join" or "gate"
    groups: int = 1
    padding: int = 0


class Random(nn.Module):
    """Layers in a chain; ``images``: convolutions 3 × 3 on [B, 3, 7, 7], else linear layers on [B, 5]."""

    def __init__(self, layers: tuple[Layer, ...], images: bool, flat: bool):
        super().__init__()
        self.spec, self.images, self.flat = layers, images, flat
        wide = 3 if images else 5
        for i, layer in enumerate(layers):
            width = wide if layer.shape in ("residual", "gate") and i else layer.width
            self.add_module(f"main{i}", self._layer(wide, width, layer))
            if layer.norm != "none":
                self.add_module(f"norm{i}", self._norm(width, layer.norm))
            self.add_module(f"act{i}", layer.activation())
            wide = wide + width if layer.shape == "join" else width
        self.head = nn.Linear(wide * (49 if images and flat else 1), 3)

    def _layer(self, read: int, write: int, layer: Layer) -> nn.Module:
        if not self.images:
            return nn.Linear(read, write, bias=layer.bias)
        groups = layer.groups if read % layer.groups == 0 and write % layer.groups == 0 else 1
        return nn.Conv2d(read, write, 3, padding=1, padding_mode="circular", bias=layer.bias, groups=groups)

    def _norm(self, width: int, norm: str) -> nn.Module:
        if norm == "group" and self.images and width % 2 == 0:
            return nn.GroupNorm(width // 2, width)
        return nn.BatchNorm2d(width) if self.images else nn.BatchNorm1d(width)

    def forward(self, x):
        for i, layer in enumerate(self.spec):
            h = getattr(self, f"main{i}")(x)
            if layer.norm != "none":
                h = getattr(self, f"norm{i}")(h)
            h = getattr(self, f"act{i}")(h)
            if layer.shape == "join":
                x = torch.cat([x, h], 1)
            elif i and layer.shape == "residual":
                x = x + h
            elif i and layer.shape == "gate":
                x = x * h
            else:
                x = h
        if self.images:
            x = x.flatten(1) if self.flat else x.mean((2, 3))
        return self.head(x)


layers = st.builds(
    Layer,
    width=st.integers(1, 9),
    activation=st.sampled_from(ACTIVATIONS),
    norm=st.sampled_from(("none", "batch", "group")),
    bias=st.booleans(),
    shape=st.sampled_from(("plain", "plain", "residual", "join", "gate")),
    groups=st.sampled_from((1, 1, 2, 3)),
)
networks = st.builds(
    lambda chain, images, flat: lambda: Random(tuple(chain), images, flat),
    st.lists(layers, min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    build=networks,
    compensation=st.sampled_from(("none", "mean", "affine")),
    criterion=st.sampled_from(("random", "l1", "variance", "variance_out")),
    scope=st.sampled_from(("layer", "global")),
    first=st.floats(0.05, 0.6),
    second=st.floats(0.5, 0.9),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    seed=st.integers(0, 99),
)
def test_pruned_equals_masked_and_training_goes_on(
    build, compensation, criterion, scope, first, second, optimizer, seed
):
    with pytest.MonkeyPatch.context() as monkeypatch:
        used = spy_on_stand_ins(monkeypatch)
        generator = torch.Generator().manual_seed(seed)
        images = build().images
        x = torch.randn(6, 3, 7, 7, generator=generator) if images else torch.randn(6, 5, generator=generator)
        inputs = (x.double(),)
        model = prepared(build, inputs, seed)
        optimizer = OPTIMIZERS[optimizer](model.parameters())
        trains(model, optimizer, inputs)
        options = {
            "example_inputs": inputs,
            "optimizer": optimizer,
            "criterion": criterion,
            "compensation": compensation,
        }
        try:
            pruner = tnvp.Pruner(model, **options, seed=seed)
        except tnvp.PruningError as error:
            assert "nothing in this network can be pruned" in str(error)
            return
        assert all(g.reason for g in pruner.groups if not g.prunable)
        assert not any("fails" in g.reason or "computes something else" in g.reason for g in pruner.groups)
        for sparsity in (first, second):
            pruned_equals_masked(pruner, used, inputs, sparsity=sparsity, scope=scope)
            trains(model, optimizer, inputs)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    build=networks,
    sparsity=st.floats(0.1, 0.8),
    compensation=st.sampled_from(("none", "mean")),
    seed=st.integers(0, 99),
)
def test_a_mask_is_the_rebuilt_network(build, sparsity, compensation, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, *((3, 7, 7) if build().images else (5,)), generator=generator).double()
    model = prepared(build, (x,), seed)
    if not any(g.prunable for g in tnvp.explain(model, x)):
        return
    outputs = {}
    for mode in ("mask", "rebuild"):
        mine = copy.deepcopy(model)
        pruner = tnvp.Pruner(mine, example_inputs=x, criterion="l2", compensation=compensation, mode=mode)
        pruner.prune(sparsity=sparsity, calibration=[x])
        outputs[mode] = mine(x).detach()
        if mode == "mask":
            pruner.rebuild()
            outputs["rebuilt later"] = mine(x).detach()
    torch.testing.assert_close(outputs["mask"], outputs["rebuild"], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(outputs["rebuilt later"], outputs["rebuild"], rtol=1e-8, atol=1e-10)
