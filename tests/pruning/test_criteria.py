"""Each criterion against its formula written out by hand."""

import pytest
import torch
from torch import nn

import tnvp
from tnvp.pruning.criteria import CRITERIA, Evidence, Side
from tnvp.pruning.errors import PruningError
from tnvp.pruning.moments import Moments

from .networks import convnet, mlp, stir

X = torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IMAGES = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def scores(model: nn.Module, x: torch.Tensor, criterion: str, **options) -> dict[str, torch.Tensor]:
    """Group → its scores, through the public face."""
    pruner = tnvp.Pruner(model, example_inputs=x, criterion=criterion, **options)
    with pruner.record(), torch.no_grad():
        model(x)
    return {group.name: group.scores for group in pruner.prune(sparsity=0.0).groups}


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.detach().double(), rtol=1e-6, atol=1e-9)


def over_space(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).flatten(0, -2)


# ==== Moments ====


def test_variance_is_that_of_what_the_consumer_reads_in_neuron_order():
    model = mlp(norm=True).double().eval()
    found = scores(model, X, "variance")
    assert_equal(found["0"], model[:3](X).var(0))
    assert_equal(found["3"], model[:6](X).var(0))


def test_variance_preactivation_is_that_of_the_producers_own_output():
    model = mlp(norm=True).double().eval()
    found = scores(model, X, "variance_preactivation")
    assert_equal(found["0"], model[:1](X).var(0))
    assert_equal(found["3"], model[:4](X).var(0))


def test_variances_of_channels_are_over_batch_and_space():
    model = stir(convnet()).double().eval()
    assert_equal(scores(model, IMAGES, "variance")["0"], over_space(model[:4](IMAGES)).var(0))
    assert_equal(scores(model, IMAGES, "variance")["4"], over_space(model[:8](IMAGES)).var(0))
    assert_equal(scores(model, IMAGES, "variance_preactivation")["4"], over_space(model[:5](IMAGES)).var(0))


def test_variance_out_is_variance_times_squared_outgoing_weights():
    model = mlp().double()
    assert_equal(scores(model, X, "variance_out")["0"], model[:2](X).var(0) * model[2].weight.square().sum(0))


def test_variance_out_is_the_expected_squared_change_of_what_the_consumer_writes():
    model = mlp().double()
    h = model[:2](X)
    found = scores(model, X, "variance_out")["0"]
    for neuron in range(3):
        constant = h.clone()
        constant[:, neuron] = h[:, neuron].mean()
        change = (model[2](h) - model[2](constant)).square().sum() / (len(X) - 1)
        assert_equal(found[neuron], change)


def test_variance_out_of_channels_goes_position_by_position():
    model = stir(convnet()).double().eval()
    found = scores(model, IMAGES, "variance_out")
    outgoing = model[4].weight.square().sum((0, 2, 3))
    assert_equal(found["0"], over_space(model[:4](IMAGES)).var(0) * outgoing)
    features = model[:9](IMAGES).var(0) * model[9].weight.square().sum(0)  # [8·2·2]
    assert_equal(found["4"], features.reshape(8, 4).sum(1))


# ==== Weights ====


def test_l1_and_l2_are_norms_of_the_incoming_weights():
    model = stir(convnet()).double().eval()
    for name, layer in (("0", model[0]), ("4", model[4]), ("9", model[9])):
        rows = layer.weight.flatten(1)
        assert_equal(scores(model, IMAGES, "l1")[name], rows.abs().sum(1))
        assert_equal(scores(model, IMAGES, "l2")[name], rows.square().sum(1).sqrt())


# ==== Several producers, several consumers ====


class Fork(nn.Module):
    """Two layers added into one stream, which two layers read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(5, 2), nn.Linear(5, 3)

    def stream(self, x):
        return self.a(x) + self.b(x).relu()

    def forward(self, x):
        h = self.stream(x)
        return self.c(h.tanh()), self.d(h)


def test_producers_weights_and_consumers_changes_add_up():
    model = Fork().double()
    h = model.stream(X)
    assert_equal(scores(model, X, "l1")["a"], (model.a.weight.abs() + model.b.weight.abs()).sum(1))
    assert_equal(scores(model, X, "l2")["a"], (model.a.weight.square() + model.b.weight.square()).sum(1).sqrt())
    out = h.tanh().var(0) * model.c.weight.square().sum(0) + h.var(0) * model.d.weight.square().sum(0)
    assert_equal(scores(model, X, "variance_out")["a"], out)


# ==== Random ====


def test_random_follows_the_pruners_seed_and_nothing_else():
    model = mlp().double()
    torch.manual_seed(1)
    one = scores(model, X, "random", seed=3)
    torch.manual_seed(2)
    two, other = scores(model, X, "random", seed=3), scores(model, X, "random", seed=4)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["0"][:9], one["2"]), "groups don't share their draws"


# ==== Any criterion ====


def evidence(count: int) -> Evidence:
    moments = Moments()
    if count:
        moments.update(torch.randn(count, 4))
    side = Side(torch.randn(4, 3), torch.arange(4), moments)
    generator = torch.Generator().manual_seed(0)
    return Evidence("block.fc1", 4, [side], [side], moments, moments, generator)


@pytest.mark.parametrize("name", [name for name, criterion in CRITERIA.items() if criterion.signal])
@pytest.mark.parametrize("count", [0, 1])
def test_too_few_samples_are_an_error_that_names_the_group_and_the_way_out(name, count):
    with pytest.raises(PruningError, match=rf"block\.fc1.*{count} samples.*record"):
        CRITERIA[name].score(evidence(count))


@pytest.mark.parametrize("name", CRITERIA)
def test_scores_are_finite_one_a_neuron_and_leave_the_evidence_alone(name):
    seen = evidence(9)
    before = [t.clone() for t in (seen.producers[0].weight, seen.activation.mean, seen.activation.variance)]
    score = CRITERIA[name].score(seen)
    assert score.shape == (4,) and bool(torch.isfinite(score).all()) and bool((score >= 0).all())
    after = (seen.producers[0].weight, seen.activation.mean, seen.activation.variance)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_cites_its_source_or_says_what_it_is(name):
    assert CRITERIA[name].score.__doc__
