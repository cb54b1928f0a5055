"""Each criterion against its formula written out by hand."""

import pytest
import torch
from torch import nn

import tnvp
from tnvp.pruning import recorder as recorders
from tnvp.pruning.criteria import CRITERIA
from tnvp.pruning.errors import PruningError
from tnvp.pruning.evidence import COUPLINGS, Evidence, Side
from tnvp.pruning.moments import Moments
from tnvp.pruning.obs import Reader, removal_scores

from .networks import convnet, mlp, stir

X = torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IMAGES = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def scores(model: nn.Module, x: torch.Tensor, criterion: str, **options) -> dict[str, torch.Tensor]:
    """Group → its scores, through the public face."""
    pruner = tnvp.Pruner(model, example_inputs=x, criterion=criterion, **options)
    watch(pruner, x)
    return {group.name: group.scores for group in pruner.prune(sparsity=0.0).groups}


def watch(pruner: tnvp.Pruner, *batches: torch.Tensor) -> None:
    """Forward, and backward of some loss."""
    with pruner.record():
        for x in batches:
            loss(pruner.model(x)).backward()
    pruner.model.zero_grad()


def loss(output) -> torch.Tensor:
    return sum(y.square().mean() for y in (output if isinstance(output, tuple) else (output,)))


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


def by_layer(model: Fork) -> dict[str, list[torch.Tensor]]:
    """Criterion → the score of each layer, written out."""
    model.zero_grad()
    h = model.stream(X)
    read = [h.tanh(), h]
    gradients = torch.autograd.grad(loss((model.c(read[0]), model.d(read[1]))), read)
    weights, outgoing = [model.a.weight, model.b.weight], [model.c.weight, model.d.weight]
    return {
        "variance": [r.var(0) for r in read],
        "variance_preactivation": [model.a(X).var(0), model.b(X).var(0)],
        "variance_out": [r.var(0) * w.square().sum(0) for r, w in zip(read, outgoing, strict=True)],
        "taylor": [(r * g).sum(0).abs() for r, g in zip(read, gradients, strict=True)],
        "apoz": [(r != 0).double().mean(0) for r in read],
        "l1": [w.abs().sum(1) for w in weights],
        "l2": [w.square().sum(1).sqrt() for w in weights],
    }


REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}


@pytest.mark.parametrize("coupled", COUPLINGS)
def test_the_scores_of_several_layers_are_coupled(coupled):
    model = Fork().double()
    for name, layers in by_layer(model).items():
        assert_equal(scores(model, X, name, coupled=coupled)["a"], REDUCTIONS[coupled](torch.stack(layers), 0))


@pytest.mark.parametrize("coupled", COUPLINGS)
def test_a_layer_without_the_neuron_has_no_say(coupled):
    model = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 4))
    sides = [Side("x", model[i].weight.detach(), torch.tensor(n)) for i, n in ((0, [0, 1, 2, 3]), (1, [-1, 1, -1, 2]))]
    found = CRITERIA["l1"].score(evidence(0, producers=sides, coupled=coupled))
    rows = [side.weight.abs().sum(1) for side in sides]
    reduce = REDUCTIONS[coupled]
    twice = [reduce(torch.stack([rows[0][n], rows[1][p]]), 0) for n, p in ((1, 1), (2, 3))]
    assert_equal(found, torch.stack([rows[0][0], *twice, rows[0][3]]))


def test_an_unknown_coupling_is_named():
    with pytest.raises(PruningError, match=r"coupled 'median'.*mean, sum, max"):
        tnvp.Pruner(mlp(), example_inputs=X.float(), coupled="median")


class Heads(nn.Module):
    """Two readers, one of which runs only on demand."""

    def __init__(self):
        super().__init__()
        self.a, self.often, self.seldom = nn.Linear(7, 5), nn.Linear(5, 2), nn.Linear(5, 2)


@pytest.mark.parametrize("name", ["variance", "variance_out", "obs", "apoz"])
def test_a_reader_that_never_ran_tells_nothing(name):
    model = Heads().double()
    model.forward = lambda x: model.often(model.a(x)).tanh()
    both, one = (
        tnvp.Pruner(model, groups=[tnvp.NeuronGroup(producers=["a"], consumers=readers)], criterion=name)
        for readers in (["often", "seldom"], ["often"])
    )
    for pruner in (both, one):
        watch(pruner, X)
    found, expected = (pruner.prune(sparsity=0.0).groups[0].scores for pruner in (both, one))
    assert_equal(found, expected)


# ==== Gradients, zeros, batch norms ====


class Gated(nn.Module):
    """A network with a gate on each neuron that its layer ``layer`` reads, of ``locations`` features each."""

    def __init__(self, model: nn.Sequential, layer: int, neurons: int, locations: int = 1):
        super().__init__()
        self.model, self.layer, self.locations = model, layer, locations
        self.gate = nn.Parameter(torch.ones(neurons, dtype=torch.double))

    def forward(self, x):
        h = self.model[: self.layer](x)
        gate = self.gate.repeat_interleave(self.locations)
        return self.model[self.layer :](h * gate.reshape([-1 if d == 1 else 1 for d in range(h.dim())]))


GATES = {
    "mlp": (lambda: mlp(norm=True), X, "0", 3, 11, 1),
    "channels": (lambda: stir(convnet()), IMAGES, "0", 4, 6, 1),
    "flattened": (lambda: stir(convnet()), IMAGES, "4", 9, 8, 4),
}


@pytest.mark.parametrize("case", GATES)
def test_taylor_is_the_gradient_of_the_loss_with_respect_to_a_gate_on_the_neuron(case):
    build, x, group, layer, neurons, locations = GATES[case]
    model = build().double()
    gated = Gated(model, layer, neurons, locations)
    batches = [x, x.flip(0) * 2, x[:3]]
    for batch in batches:
        loss(gated(batch)).backward()
    model.zero_grad()
    pruner = tnvp.Pruner(model, example_inputs=x, criterion="taylor")
    watch(pruner, *batches)
    found = {g.name: g.scores for g in pruner.prune(sparsity=0.0).groups}
    assert_equal(found[group], gated.gate.grad.abs())


@pytest.mark.parametrize("recorded", [False, True])
def test_taylor_without_a_backward_pass_says_what_it_needs(recorded):
    pruner = tnvp.Pruner(mlp().double(), example_inputs=X, criterion="taylor")
    if recorded:
        with pruner.record(), torch.no_grad():
            pruner.model(X)
    before = [parameter.clone() for parameter in pruner.model.parameters()]
    with pytest.raises(PruningError, match=r"group '0': 0 samples.*record\(\) around training with backward"):
        pruner.prune(sparsity=0.5, calibration=[X])
    assert all(torch.equal(a, b) for a, b in zip(before, pruner.model.parameters(), strict=True))


def test_apoz_counts_the_activations_that_are_not_zero():
    model = mlp().double()
    counted = (model[:2](X) > 0).sum(0) / len(X)
    assert 0 < counted.min() < counted.max() <= 1
    assert_equal(scores(model, X, "apoz")["0"], counted)
    network = convnet().double().eval()
    network[6] = nn.ReLU()
    assert_equal(scores(network, IMAGES, "apoz")["4"], (over_space(network[:8](IMAGES)) > 0).double().mean(0))


def test_bn_scale_is_the_absolute_weight_of_the_batch_norm():
    model = stir(convnet()).double().eval()
    model[5].weight.detach().mul_(-1)
    found = scores(model, IMAGES, "bn_scale", ignore=["9"])
    assert_equal(found["0"], model[1].weight.abs())
    assert_equal(found["4"], model[5].weight.abs())


@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(11, affine=False)])
def test_bn_scale_without_a_batch_norms_weight_names_the_group_and_the_way_out(norm):
    model = mlp()
    if norm is not None:
        model.insert(1, norm)
    with pytest.raises(PruningError, match=r"group '0'.*batch norm.*ignore=\['0'\].*another criterion"):
        tnvp.Pruner(model, example_inputs=X.float(), criterion="bn_scale", compensation="none").prune(sparsity=0.5)


# ==== Optimal brain surgeon ====


def surgeon(h: torch.Tensor, weight: torch.Tensor, neuron: torch.Tensor, size: int) -> Reader:
    return Reader(torch.cov(h.detach().T), weight.detach().movedim(1, 0).flatten(1), neuron, size)


def test_obs_is_greedy_removal_by_the_covariance_of_what_the_consumer_reads():
    model = mlp().double()
    expected = removal_scores([surgeon(model[:2](X), model[2].weight, torch.arange(11), 11)], 11)
    assert_equal(scores(model, X, "obs")["0"], expected)
    network, images = stir(convnet()).double().eval(), torch.cat([IMAGES, IMAGES.flip(2), IMAGES.flip(3)])
    found = scores(network, images, "obs")
    expected = removal_scores([surgeon(over_space(network[:4](images)), network[4].weight, torch.arange(6), 6)], 6)
    assert_equal(found["0"], expected)
    features = torch.arange(8).repeat_interleave(4)
    expected = removal_scores([surgeon(network[:9](images), network[9].weight, features, 8)], 8)
    assert_equal(found["4"], expected)


@pytest.mark.parametrize("coupled", COUPLINGS)
def test_obs_adds_consumers_up_whatever_the_coupling(coupled):
    model = Fork().double()
    h, every = model.stream(X), torch.arange(5)
    both = [surgeon(h.tanh(), model.c.weight, every, 5), surgeon(h, model.d.weight, every, 5)]
    assert_equal(scores(model, X, "obs", coupled=coupled)["a"], removal_scores(both, 5))


def test_obs_of_a_large_flattened_input_takes_each_location_for_a_sample(monkeypatch):
    monkeypatch.setattr(recorders, "LARGEST_COVARIANCE", 10)
    model = stir(convnet()).double().eval()
    read = model[:9](IMAGES).detach().unflatten(1, (8, 4))  # [B, C, L]
    covariance = sum(torch.cov(read[:, :, place].T) for place in range(4)) / 4
    weight = model[9].weight.detach().unflatten(1, (8, 4)).movedim(0, -1).flatten(1)  # [C, L·O]
    expected = removal_scores([Reader(covariance, weight, torch.arange(8), 8)], 8)
    assert_equal(scores(model, IMAGES, "obs")["4"], expected)
    monkeypatch.setattr(recorders, "LARGEST_COVARIANCE", 7)
    with pytest.raises(PruningError, match=r"'9' reads 32 features, too many.*ignore.*another criterion"):
        scores(model, IMAGES, "obs")


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e4])
def test_obs_lets_neurons_that_never_vary_go_first_and_for_nothing(constant):
    model = mlp().float()
    with torch.no_grad():
        model[0].weight[[3, 8]] = 0
        model[0].bias[[3, 8]] = constant
    pruner = tnvp.Pruner(model, example_inputs=X.float(), criterion="obs")
    watch(pruner, *(X.float() * scale for scale in (0.3, 1, 7)))
    found = pruner.prune(sparsity=0.0).groups[0].scores
    assert sorted(found.argsort()[:2].tolist()) == [3, 8]
    assert float(found[[3, 8]].max()) < 1e-15 * float(found.sort().values[2])


def test_obs_asks_the_calibration_pass_and_the_others_what_was_recorded():
    later = X.flip(1) * 3
    for name, asked in (("obs", later), ("variance", X)):
        torch.manual_seed(0)
        model = mlp().double()
        expected = scores(model, asked, name)
        pruner = tnvp.Pruner(model, example_inputs=X, criterion=name)
        watch(pruner, X)
        for group in pruner.prune(sparsity=0.0, calibration=[later]).groups:
            assert_equal(group.scores, expected[group.name])


def test_obs_without_a_covariance_says_what_it_needs():
    pruner = tnvp.Pruner(mlp().double(), example_inputs=X, criterion="obs")
    with pruner.record(covariance=False):
        pruner.model(X)
    with pytest.raises(PruningError, match=r"0 samples of the covariance at '2'.*calibration"):
        pruner.prune(sparsity=0.5)
    pruner.prune(sparsity=0.5, calibration=[X])


# ==== End to end ====


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("network", ["mlp", "convnet"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_criterion_prunes_the_neurons_it_scores_lowest(name, network, scope):
    model, x = (mlp(norm=True), X) if network == "mlp" else (stir(convnet()), IMAGES)
    model = model.double()
    ignore = ["9"] if network == "convnet" else []  # has no batch norm
    pruner = tnvp.Pruner(model, example_inputs=x, criterion=name, ignore=ignore)
    watch(pruner, x, x.flip(0))
    pruner.close_window()
    before = sum(pruner.widths.values())
    report = pruner.prune(sparsity=0.5, scope=scope, normalize="mean")
    assert sum(pruner.widths.values()) == pytest.approx(before / 2, abs=1)
    for group in report.groups:
        assert not group.removed or group.scores[group.removed].max() <= group.scores[group.kept].min()
    assert len(pruner.trace) == len(report.groups)
    watch(pruner, x)  # goes on with the survivors
    pruner.prune(sparsity=0.7, calibration=[x])
    assert bool(torch.isfinite(model(x)).all())


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


def evidence(count: int, **changes) -> Evidence:
    moments, nonzero = Moments(covariance=True), Moments()
    if count:
        moments.update(torch.randn(count, 4))
        nonzero.update((torch.randn(count, 4) > 0).float())
    covariance = (moments.covariance, 1) if count > 1 else None
    side = Side("fc2", torch.randn(4, 3), torch.arange(4), moments, nonzero, moments, covariance)
    sides = {"producers": [side], "consumers": [side], "norms": [Side("bn", torch.randn(4), torch.arange(4))]}
    return Evidence(
        **{"group": "block.fc1", "size": 4, "generator": torch.Generator().manual_seed(0), **sides, **changes}
    )


NEED_TWO = [(name, 1) for name in ("variance", "variance_preactivation", "variance_out", "obs")]


@pytest.mark.parametrize(
    ("name", "count"), [(n, 0) for n, criterion in CRITERIA.items() if criterion.signal] + NEED_TWO
)
def test_too_few_samples_are_an_error_that_names_the_group_and_the_way_out(name, count):
    with pytest.raises(PruningError, match=rf"block\.fc1.*{count} samples.*record"):
        CRITERIA[name].score(evidence(count))


@pytest.mark.parametrize("name", CRITERIA)
def test_scores_are_finite_one_a_neuron_and_leave_the_evidence_alone(name):
    seen = evidence(9)
    consumer = seen.consumers[0]

    def all_of_it():
        moments = consumer.moments
        return [t.clone() for t in (consumer.weight, moments.mean, moments.variance, consumer.covariance[0])]

    before = all_of_it()
    score = CRITERIA[name].score(seen)
    assert score.shape == (4,) and bool(torch.isfinite(score).all()) and bool((score >= 0).all())
    assert all(torch.equal(a, b) for a, b in zip(before, all_of_it(), strict=True))


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_cites_its_source_or_says_what_it_is(name):
    assert CRITERIA[name].score.__doc__
