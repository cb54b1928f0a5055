"""The certificate: the change that the masked network predicts, the one measured, and a warning where they disagree.
Recalibration of batch norms is a step of its own, reported apart."""

import copy
import math

import pytest
import torch
from torch import nn

import tnvp
from tnvp.pruning import pruner as pruners
from tnvp.pruning.calibration import recalibrate

from .networks import convnet, mlp, stir

X = torch.randn(32, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(8, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def padded() -> nn.Sequential:
    """A padded convolution reads another one's ReLUs, whose means are far from 0."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 4)
    ).double()


def pruned(model: nn.Module, x: torch.Tensor, **options) -> tnvp.PruneReport:
    torch.manual_seed(0)
    chosen = {name: options.pop(name) for name in ("compensation", "ignore") if name in options}
    return tnvp.Pruner(model, example_inputs=x, criterion="l2", **chosen).prune(
        sparsity=0.5, calibration=[x[: len(x) // 2], x[len(x) // 2 :]], **options
    )


@pytest.mark.parametrize("compensation", ["none", "mean", "act_of_mean", "affine"])
def test_without_borders_the_prediction_is_the_measurement(compensation):
    model = mlp().double().eval()
    before = model(X)
    report = pruned(model, X, compensation=compensation)
    found, change = report.certificate, model(X) - before
    assert found.border_part < 1e-12 and found.disagreement == ""
    assert found.measured == pytest.approx(float(change.norm() / before.norm()), rel=1e-9) == report.output_error
    assert found.predicted == pytest.approx(found.measured, rel=1e-9)
    mean = float(change.mean(0).norm() * math.sqrt(len(X)) / before.norm())
    assert found.mean_part == pytest.approx(mean, rel=1e-9)
    assert found.remainder == pytest.approx(float((change - change.mean(0)).norm() / before.norm()), rel=1e-9)


def test_the_mean_takes_the_mean_part_of_one_layer_away():
    found = {}
    for compensation in ("none", "mean"):
        model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 4)).double()
        found[compensation] = pruned(model, X, compensation=compensation).certificate
    assert found["none"].mean_part > 0.1 > 1e-12 > found["mean"].mean_part


def test_the_border_part_is_what_zero_padding_does_not_absorb():
    torch.manual_seed(5)
    first, second = padded(), padded()
    second.load_state_dict(first.state_dict())
    assert pruned(first, IMAGES, compensation="none").certificate.border_part < 1e-12
    before = copy.deepcopy(second)
    report = pruned(second, IMAGES, compensation="mean", ignore=["2"])
    assert 0.001 < report.certificate.border_part < 0.5
    removed = report.groups[0].removed
    with torch.no_grad():
        means = before[1](before[0](IMAGES)).mean((0, 2, 3))
        masked = before[1](before[0](IMAGES))
        masked[:, removed] = means[removed, None, None]
        expected, output = before[2](masked), second[2](second[1](second[0](IMAGES)))
        original = before(IMAGES)
        shift = before[5](before[4](before[3](expected))) - second(IMAGES)
    torch.testing.assert_close(output[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1], rtol=1e-9, atol=1e-9)
    assert (output - expected).abs().max() > 1e-3
    assert report.certificate.border_part == pytest.approx(float(shift.norm() / original.norm()), rel=1e-6)


def test_a_network_that_is_not_the_masked_one_is_told_of_loudly(monkeypatch):
    def careless(model, changes, cuts):
        real(model, changes, cuts)
        model[2].weight.detach()[0, 0] += 1

    real = pruners.execute
    monkeypatch.setattr(pruners, "execute", careless)
    with pytest.warns(UserWarning, match=r"changed by .*%, the masked one's by .*nothing in the network explains it"):
        report = pruned(mlp().double(), X)
    assert "nothing in the network explains it" in report.certificate.disagreement


def test_without_calibration_there_is_none():
    report = tnvp.Pruner(mlp().double(), example_inputs=X, criterion="l2", compensation="none").prune(sparsity=0.5)
    assert report.certificate is None and report.output_error is None


def test_recalibration_is_the_plain_mean_over_the_batches():
    model = stir(convnet()).double().train()
    batches = [(IMAGES[:4],), (IMAGES[4:],)]
    with torch.no_grad():
        expected = torch.stack([model[0](x).mean((0, 2, 3)) for (x,) in batches]).mean(0)
    others = {name: p.clone() for name, p in model.named_parameters()}
    momentum = model[1].momentum
    recalibrate(model, batches)
    torch.testing.assert_close(model[1].running_mean, expected)
    assert model[1].momentum == momentum and all(module.training for module in model.modules())
    assert all(torch.equal(p, others[name]) for name, p in model.named_parameters())


def test_recalibration_after_an_event_is_reported_apart():
    model = stir(convnet()).double()
    report = pruned(model, IMAGES, bn_recalibrate=[IMAGES])
    assert report.output_error == report.certificate.measured != report.recalibrated_error > 0
    assert "once batch norms were recalibrated" in str(report)
    assert pruned(stir(convnet()).double(), IMAGES).recalibrated_error is None


@pytest.mark.parametrize(
    ("build", "batches", "message"),
    [
        (lambda: mlp().double(), [X], "no batch norm with running statistics"),
        (lambda: mlp(norm=True).double(), [X[:1]], "more than 1 value"),
        (lambda: mlp(norm=True).double(), [], "empty"),
    ],
)
def test_recalibration_that_cannot_be_done_leaves_all_as_it_was(build, batches, message):
    model = build()
    before, leaves = copy.deepcopy(model.state_dict()), list(model.parameters())
    with pytest.raises(tnvp.PruningError, match=message):
        pruned(model, X, bn_recalibrate=batches)
    assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
