"""The laws on networks that others wrote: torchvision's, with random weights, in float64."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torchvision import models

import tnvp

from .law import difference, doubled, prepared, pruned_equals_masked, spy_on_stand_ins, trains

slow = pytest.mark.slow


def small_vit() -> nn.Module:
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=10
    )


# name → (network, image size, prunable groups, groups left alone: layer → words of the reason; the classifier's output always is).
NETWORKS = {
    "alexnet": (models.alexnet, 64, 7, {}),
    "vgg11_bn": (models.vgg11_bn, 32, 10, {}),
    "resnet18": (models.resnet18, 32, 12, {}),
    "resnext50_32x4d": (models.resnext50_32x4d, 32, 21, {}),
    "squeezenet1_1": (models.squeezenet1_1, 32, 25, {}),
    "densenet121": (models.densenet121, 32, 120, {}),
    "mobilenet_v2": (models.mobilenet_v2, 32, 25, {}),
    "mobilenet_v3_small": (models.mobilenet_v3_small, 32, 27, {}),
    "efficientnet_b0": (models.efficientnet_b0, 32, 40, {}),
    "shufflenet_v2_x0_5": (
        models.shufflenet_v2_x0_5, 32, 20, {"stage3.0.branch1.2": "tied", "stage3.6.branch2.5": "fixed size|tied"},
    ),
    "mnasnet0_5": (models.mnasnet0_5, 32, 25, {}),
    "googlenet": (lambda **o: models.googlenet(aux_logits=False, init_weights=False, **o), 32, 57, {}),
    "regnet_y_400mf": (models.regnet_y_400mf, 32, 37, {}),
    "convnext_tiny": (
        models.convnext_tiny, 32, 18,
        {"features.0.0": "layer_norm", "features.1.0.block.5": "fixed size|layer_norm", "features.2.1": "LayerNorm",
         "features.4.1": "LayerNorm", "features.6.1": "LayerNorm"},
    ),
    "a small vision transformer": (
        lambda num_classes: small_vit(), 32, 4,
        {"conv_proj": "hard-coded", "encoder.layers.encoder_layer_0.self_attention.out_proj": "fixed size"},
    ),
    "vit_b_16": (
        lambda **o: models.vit_b_16(image_size=64, **o), 64, 24,
        {"conv_proj": "hard-coded", "encoder.layers.encoder_layer_0.self_attention.out_proj": "fixed size"},
    ),
    "swin_t": (
        models.swin_t, 32, 12,
        {"features.0.0": "LayerNorm", "features.2.reduction": "LayerNorm", "features.4.reduction": "LayerNorm",
         "features.6.reduction": "LayerNorm"},
    ),
}  # fmt: skip
SLOW = {
    "alexnet",
    "vgg11_bn",
    "resnext50_32x4d",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "efficientnet_b0",
    "mobilenet_v3_small",
}
NAMES = [pytest.param(name, marks=slow) if name in SLOW else name for name in NETWORKS]


@pytest.mark.parametrize("name", NAMES)
def test_pruned_equals_masked_trains_on_and_can_be_saved(name, monkeypatch, tmp_path):
    make, size, prunable, refused = NETWORKS[name]
    inputs = doubled(torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)))
    model = prepared(lambda: make(num_classes=10), inputs)
    used = spy_on_stand_ins(monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    trains(model, optimizer, inputs)
    pruner = tnvp.Pruner(model, example_inputs=inputs, optimizer=optimizer, criterion="l2", compensation="none")
    assert_groups(pruner.groups, prunable, refused)
    widths = pruner.widths
    for sparsity, scope in ((0.4, "layer"), (0.6, "global")):
        report = pruned_equals_masked(pruner, used, inputs, sparsity=sparsity, scope=scope)
    assert report.certificate.predicted > 1e-4, "the network must hear of it"
    assert 0.5 < report.neuron_sparsity < 0.65 and report.parameter_sparsity > 0.3
    assert sum(pruner.widths[g] < width for g, width in widths.items()) > 0.8 * len(widths)
    trains(model, optimizer, inputs)
    tnvp.save(model, tmp_path / "net.pt")
    loaded = tnvp.load(tmp_path / "net.pt", into=make(num_classes=10))
    with torch.no_grad():
        assert difference(loaded(*inputs), model(*inputs)) < 1e-12


def assert_groups(groups, prunable: int, refused: dict[str, str]) -> None:
    left = {g.name: g.reason for g in groups if not g.prunable}
    assert sum(g.prunable for g in groups) == prunable
    assert sum("is an output of the network" in why for why in left.values()) == 1
    assert left.keys() - refused.keys() == {name for name, why in left.items() if "is an output" in why}
    for name, words in refused.items():
        assert re.search(words, left[name]), (name, left[name])


@pytest.mark.parametrize("name", ["mobilenet_v2", pytest.param("resnet18", marks=slow), "googlenet"])
def test_means_are_folded(name, monkeypatch):
    make, size, _, _ = NETWORKS[name]
    inputs = doubled(torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)))
    model = prepared(lambda: make(num_classes=10), inputs)
    pruner = tnvp.Pruner(model, example_inputs=inputs, criterion="variance", compensation="mean")
    pruned_equals_masked(pruner, spy_on_stand_ins(monkeypatch), inputs, sparsity=0.5)


@slow
def test_a_network_with_auxiliary_heads_keeps_what_they_read():
    """They run in training only: what they read can't be traced in eval mode, and must stay."""
    inputs = (torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)),)
    model = models.googlenet(num_classes=10, init_weights=False).eval()
    before = {name: p.shape for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tnvp.Pruner(model, example_inputs=inputs, criterion="l2", compensation="none").prune(sparsity=0.5)
    assert all(p.shape == before[name] for name, p in model.named_parameters() if name.startswith("aux"))
    main, *auxiliary = model.train()(*inputs)
    (main.sum() + sum(x.sum() for x in auxiliary)).backward()
