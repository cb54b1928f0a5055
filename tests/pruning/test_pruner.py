"""The public face: what `Pruner` takes, refuses and gives back; and all that a training loop holds goes on."""

import copy
import math
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tnvp
from tnvp.pruning.errors import PruningError

from .networks import convnet, mlp, stir

X = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def pruner_of(model: nn.Module, x=X, **options) -> tnvp.Pruner:
    """A pruner that needs nothing recorded, unless asked otherwise."""
    return tnvp.Pruner(model, **{"example_inputs": x, "criterion": "l1", "compensation": "none"} | options)


def watched(model: nn.Module, x=X, **options) -> tnvp.Pruner:
    pruner = tnvp.Pruner(model, example_inputs=x, **options)
    with pruner.record(), torch.no_grad():
        model(x)
    return pruner


def loss(model: nn.Module, x=X) -> torch.Tensor:
    return model(x).square().mean()


def widths(model: nn.Module) -> list[int]:
    return [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]


class Snapshot:
    """All about the training's objects that a refused event must leave alone, bit for bit and one by one."""

    def __init__(self, model, optimizer=None, *averaged):
        self.objects = (model, optimizer, *averaged)
        self.taken = self.take()
        self.copies = copy.deepcopy(self.tensors())

    def modules(self):
        return [m for thing in self.objects if isinstance(thing, nn.Module) for m in thing.modules()]

    def take(self):
        tensors = [(id(t), t.shape, t.requires_grad, id(t.grad)) for m in self.modules() for t in m.parameters(False)]
        sizes = [(id(m), repr(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in self.modules()]
        optimizer = self.objects[1]
        groups = (
            [] if optimizer is None else [{**g, "params": [id(p) for p in g["params"]]} for g in optimizer.param_groups]
        )
        state = [] if optimizer is None else [(id(p), list(s)) for p, s in optimizer.state.items()]
        return tensors, sizes, groups, state

    def tensors(self) -> list[torch.Tensor]:
        found = [t for m in self.modules() for t in (*m.parameters(False), *m.buffers(False))]
        found += [t.grad for t in found if t.grad is not None]
        states = [] if self.objects[1] is None else self.objects[1].state.values()
        return [t.detach() for t in found] + [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]

    def assert_untouched(self) -> None:
        assert self.take() == self.taken
        assert all(torch.equal(a, b) for a, b in zip(self.tensors(), self.copies, strict=True))


# ==== The five lines ====


def test_the_five_lines_and_the_report():
    model = mlp(norm=True)
    optimizer = torch.optim.Adam(model.parameters())
    parameters = sum(p.numel() for p in model.parameters())
    pruner = tnvp.Pruner(model, optimizer=optimizer, example_inputs=X, criterion="variance", compensation="mean")
    with pruner.record():
        for _ in range(3):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    model.eval()
    report = pruner.prune(sparsity=0.5, calibration=[X])
    assert widths(model) == [5, 4, 4], "11 and 9 neurons lose 5.5 and 4.5, rounded up"
    assert report.neuron_sparsity == pytest.approx(11 / 20)
    left = sum(p.numel() for p in model.parameters())
    assert report.parameter_sparsity == pytest.approx(1 - left / parameters)
    flops = 2 * len(X) * (7 * 5 + 5 * 4 + 4 * 4), 2 * len(X) * (7 * 11 + 11 * 9 + 9 * 4)
    assert report.flops_reduction == pytest.approx(1 - flops[0] / flops[1])
    assert (report.parameters, report.flops) == (left, flops[0])
    for group, n in zip(report.groups, (11, 9), strict=True):
        assert sorted(group.removed + group.kept) == list(range(n)) and len(group.scores) == n
        assert set(group.removed_in) == {*group.producers, *group.passengers, *group.consumers}
        assert all(removed == group.removed for removed in group.removed_in.values())
        assert group.scores[group.kept].min() >= group.scores[group.removed].max() == group.threshold
    assert report.requested == {"sparsity": 0.5} and report.seconds > 0
    assert "55.0%" in str(report)


def test_removed_in_tells_each_layers_own_indices_behind_flatten():
    model = stir(convnet())
    report = pruner_of(model, IMAGES).prune(sparsity=0.5)
    group = report.groups[1]
    assert group.removed_in["9"] == [4 * neuron + position for neuron in group.removed for position in range(4)]
    assert group.removed_in["4"] == group.removed_in["5"] == group.removed


def test_output_error_is_the_relative_change_of_the_output_on_the_calibration_data():
    model = mlp().eval()
    before = model(X).detach().double()
    report = pruner_of(model).prune(sparsity=0.5, calibration=[X[:5], X[5:]])
    expected = (model(X).detach().double() - before).norm() / before.norm()
    assert report.output_error == pytest.approx(float(expected), rel=1e-5)
    assert report.output_error > 0
    assert pruner_of(mlp()).prune(sparsity=0.5).output_error is None
    assert pruner_of(mlp()).prune(sparsity=0.0, calibration=[X]).output_error == 0


def test_mean_compensation_keeps_the_mean_of_what_the_consumers_write():
    model = mlp((7, 11, 4)).double().eval()
    x = X.double()
    before = model(x).mean(0)
    watched(model, x, compensation="mean").prune(sparsity=0.6)
    torch.testing.assert_close(model(x).mean(0), before)


def test_act_of_mean_is_the_activation_of_the_mean_of_the_preactivation():
    model = mlp((7, 11, 4), activation=nn.Sigmoid).double().eval()
    first, second = copy.deepcopy(model[0]), copy.deepcopy(model[2])
    x = X.double()
    removed = watched(model, x, compensation="act_of_mean").prune(sparsity=0.6).groups[0].removed
    constant = first(x).mean(0).sigmoid()
    expected = second.bias + second.weight[:, removed] @ constant[removed]
    torch.testing.assert_close(model[2].bias, expected)


def test_without_compensation_no_bias_moves_and_none_is_made():
    model = mlp(bias=False)
    pruner_of(model).prune(sparsity=0.5)
    assert all(layer.bias is None for layer in (model[0], model[2], model[4]))
    model = mlp()
    bias = model[4].bias
    pruner_of(model).prune(sparsity=0.5)
    assert model[4].bias is bias


# ==== Budgets ====


@pytest.mark.parametrize("budget", [{"sparsity": 0.5}, {"parameter_reduction": 0.4}, {"flops_reduction": 0.4}])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("criterion", ["l1", "variance"])
def test_asking_twice_for_the_same_removes_nothing_the_second_time(budget, scope, criterion):
    model = mlp()
    pruner = watched(model, criterion=criterion)
    once = pruner.prune(**budget, scope=scope)
    leaves = list(model.parameters())
    with pruner.record(), torch.no_grad():
        model(X + 1)
    twice = pruner.prune(**budget, scope=scope)
    assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))
    assert not any(group.removed for group in twice.groups)
    assert twice.neuron_sparsity == once.neuron_sparsity > 0


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", ["parameter_reduction", "flops_reduction"])
def test_reductions_are_reached_and_not_much_overshot(name, scope):
    model = convnet()
    report = pruner_of(model, IMAGES).prune(**{name: 0.4}, scope=scope)
    reached = report.parameter_sparsity if name == "parameter_reduction" else report.flops_reduction
    assert 0.4 <= reached < 0.55
    assert report.requested == {name: 0.4}


def test_sparsity_in_steps_is_of_the_original_network():
    model = mlp((7, 20, 4))
    pruner = pruner_of(model)
    assert [(pruner.prune(sparsity=s).neuron_sparsity, widths(model)[0]) for s in (0.25, 0.5, 0.75)] == [
        (0.25, 15), (0.5, 10), (0.75, 5),
    ]  # fmt: skip
    assert pruner.prune(sparsity=0.2).neuron_sparsity == 0.75


def test_the_threshold_is_the_demos_rule_on_standard_deviations():
    model = mlp((7, 30, 4))
    with torch.no_grad():
        model[0].weight.mul_(torch.linspace(0.05, 2, 30)[:, None])
    std = model[0](X).std(0).detach()
    pruner = watched(model, criterion="variance_preactivation", compensation="act_of_mean")
    kept = pruner.prune(threshold=0.6).groups[0].kept
    assert kept == (std >= 0.6 * std.mean()).nonzero().flatten().tolist()
    assert 0 < len(kept) < 30


@pytest.mark.parametrize("budget", [{"sparsity": 0.99}, {"threshold": 100.0}, {"parameter_reduction": 0.999}])
def test_an_unreachable_target_is_capped_at_min_neurons_and_reported(budget):
    model = mlp()
    report = pruner_of(model).prune(**budget, min_neurons=3)
    assert widths(model) == [3, 3, 4]
    assert report.neuron_sparsity == pytest.approx(14 / 20)
    assert report.requested == budget


def test_widths_keep_to_multiples():
    model = mlp((7, 40, 24, 4))
    pruner_of(model).prune(sparsity=0.37, round_to=8)
    assert widths(model) == [32, 16, 4]


# ==== Bad use: an error that names what was wrong, the value, and what to do ====

BAD_CALLS = {
    "no budget": ({}, r"exactly one of sparsity.*got none"),
    "two budgets": ({"sparsity": 0.5, "threshold": 0.6}, r"exactly one of.*got sparsity, threshold"),
    "percent": ({"sparsity": 50}, r"sparsity.*50.*did you mean 0\.5"),
    "percent of FLOPs": ({"flops_reduction": 30.0}, r"flops_reduction.*did you mean 0\.3"),
    "all": ({"sparsity": 1.0}, r"sparsity.*\[0, 1\).*1"),
    "negative": ({"sparsity": -0.1}, r"sparsity.*-0\.1"),
    "nan": ({"sparsity": math.nan}, r"sparsity.*nan"),
    "infinite threshold": ({"threshold": math.inf}, r"threshold.*inf"),
    "negative threshold": ({"threshold": -1.0}, r"threshold.*-1"),
    "text": ({"sparsity": "0.5"}, r"sparsity.*'0\.5'"),
    "true": ({"sparsity": True}, r"sparsity.*True"),
    "scope": ({"sparsity": 0.5, "scope": "network"}, r"scope 'network'.*layer.*global"),
    "min_neurons": ({"sparsity": 0.5, "min_neurons": 0}, r"min_neurons.*0"),
    "round_to": ({"sparsity": 0.5, "round_to": 2.5}, r"round_to.*2\.5"),
    "empty calibration": ({"sparsity": 0.5, "calibration": []}, r"calibration is empty"),
    "a used-up generator": ({"sparsity": 0.5, "calibration": iter(())}, r"calibration is empty"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_of_prune_changes_nothing_and_says_what_was_wrong(name):
    arguments, message = BAD_CALLS[name]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pruner_of(model, optimizer=optimizer)
    snapshot = Snapshot(model, optimizer)
    with pytest.raises(PruningError, match=message):
        pruner.prune(**arguments)
    snapshot.assert_untouched()


def test_a_number_may_come_from_numpy():
    sparsity = torch.tensor(0.5).numpy()[()]
    assert type(sparsity).__name__ == "float32"
    assert pruner_of(mlp((7, 8, 4))).prune(sparsity=sparsity).neuron_sparsity == 0.5


BAD_PRUNERS = {
    "criterion": ({"criterion": "variances"}, r"criterion 'variances'.*variance.*l1"),
    "compensation": ({"compensation": "median"}, r"compensation 'median'.*none.*mean"),
    "window": ({"window": "epoch"}, r"window 'epoch'.*cumulative.*calibration"),
    "ignore": ({"ignore": ["head"]}, r"ignore.*'head'.*0, 2, 4"),
    "ignore, one name": ({"ignore": "head"}, r"'head'"),
    "no inputs": ({"example_inputs": None}, r"example_inputs.*groups"),
    "all ignored": (
        {"ignore": ["0", "2"]},
        r"(?s)nothing.*0 .*ignore.*2 .*ignore.*4 .*output of the network",
    ),
    "no groups": ({"groups": []}, r"nothing.*can be pruned"),
    "unknown layer": (
        {"groups": [tnvp.NeuronGroup(producers=["0"], consumers=["9"])]},
        r"'9'.*model lacks.*0.*2",
    ),
    "no consumer": ({"groups": [tnvp.NeuronGroup(producers=["0"])]}, r"group.*consumer"),
    "not a layer": ({"groups": [tnvp.NeuronGroup(producers=["1"], consumers=["2"])]}, r"'1' \(ReLU\)"),
    "widths that don't fit": (
        {"groups": [tnvp.NeuronGroup(producers=["0"], consumers=["4"])]},
        r"'4'.*9.*11",
    ),
}


@pytest.mark.parametrize("name", BAD_PRUNERS)
def test_a_bad_pruner_is_refused_at_once(name):
    arguments, message = BAD_PRUNERS[name]
    model = mlp()
    snapshot = Snapshot(model)
    with pytest.raises(PruningError, match=message):
        pruner_of(model, **arguments)
    snapshot.assert_untouched()


def test_nothing_prunable_is_an_error_that_lists_each_group_and_why():
    with pytest.raises(PruningError, match=r"(?s)nothing.*0 .*output of the network"):
        pruner_of(nn.Sequential(nn.Linear(7, 3), nn.ReLU()))
    with pytest.raises(PruningError, match="nothing"):
        pruner_of(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("name", ["0", "1"])
def test_ignored_layers_keep_their_neurons(name):
    model = mlp(norm=True)
    pruner_of(model, ignore=[name]).prune(sparsity=0.5)
    assert widths(model)[0] == 11 == model[1].num_features, "the linear layer and the batch norm that carries it"
    assert widths(model)[1] == 4


def test_nothing_recorded_is_an_error_that_says_how_to_record():
    for options in ({"criterion": "variance"}, {"criterion": "l1", "compensation": "mean"}):
        pruner = pruner_of(mlp(), **options)
        with pytest.raises(PruningError, match=r"record\(\)|calibration"):
            pruner.prune(sparsity=0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_network_is_refused_with_the_layers_name_and_left_alone(bad):
    model = mlp()
    poisoned = X.clone()
    poisoned[0, 0] = bad
    pruner = pruner_of(model)
    with pruner.record(), torch.no_grad():
        model(poisoned)
    snapshot = Snapshot(model)
    with pytest.raises(PruningError, match=r"NaN or Inf.* at 2 "):
        pruner.prune(sparsity=0.5)
    snapshot.assert_untouched()
    with torch.no_grad():
        model[0].weight[3, 3] = math.nan
    with pytest.raises(PruningError, match="NaN"):
        pruner_of(model).prune(sparsity=0.5)


# ==== Calibration ====

CALIBRATIONS = {
    "a loader of (x, y)": lambda: DataLoader(TensorDataset(X, torch.zeros(len(X))), batch_size=5),
    "a loader of (x,)": lambda: DataLoader(TensorDataset(X), batch_size=5),
    "tensors": lambda: [X[:5], X[5:]],
    "pairs": lambda: [(X[:5], None), [X[5:], None]],
    "a generator": lambda: (x for x in X.split(5)),
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_calibration_comes_as_a_loader_or_batches_and_serves_scores_and_compensation(name):
    model = mlp()
    twin = copy.deepcopy(model)
    report = tnvp.Pruner(model, example_inputs=X).prune(sparsity=0.5, calibration=CALIBRATIONS[name]())
    expected = watched(twin).prune(sparsity=0.5, calibration=[X])
    assert [g.kept for g in report.groups] == [g.kept for g in expected.groups]
    assert report.output_error == pytest.approx(expected.output_error, rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c, self.b = nn.Linear(7, 8), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        return self.b(self.a(x).relu() + self.c(y))


@pytest.mark.parametrize("loaded", [False, True])
def test_a_network_with_two_inputs_is_calibrated_on_pairs_of_inputs(loaded):
    data = [((X[i], X[i, :5]), 1) for i in range(6)]
    batches = DataLoader(data, batch_size=3) if loaded else [((X[:6], X[:6, :5]), None)]
    pruner = tnvp.Pruner(TwoInputs(), example_inputs=(X, X[:, :5]))
    assert pruner.prune(sparsity=0.5, calibration=batches).neuron_sparsity == 0.5


def test_a_bare_tensor_of_images_as_calibration_is_one_batch_or_an_error_but_not_a_crash():
    model = convnet()
    snapshot = Snapshot(model)
    try:
        report = tnvp.Pruner(model, example_inputs=IMAGES).prune(sparsity=0.5, calibration=IMAGES)
    except PruningError:
        snapshot.assert_untouched()
    else:
        assert report.neuron_sparsity > 0


def test_calibration_serves_the_scores_wherever_the_window_is_empty():
    model = mlp()
    pruner = watched(model, window="since_prune")
    pruner.prune(sparsity=0.2, calibration=[X])
    assert pruner.prune(sparsity=0.5, calibration=[X]).neuron_sparsity == pytest.approx(11 / 20)


@pytest.mark.parametrize("criterion", ["variance", "variance_preactivation", "apoz"])
def test_the_calibration_window_scores_the_events_batches_whatever_was_recorded(criterion):
    """As if nothing had been recorded; the trace is there all the same."""
    options = {"criterion": criterion, "window": "calibration"}
    model, scores = mlp(), []
    for loop in ([], [X], [10 * X + 3]):
        pruner = tnvp.Pruner(copy.deepcopy(model), example_inputs=X, **options)
        with pruner.record():
            for x in loop:
                pruner.model(x)
        pruner.close_window()
        assert len(pruner.trace) == len(loop) * 2
        scores.append(torch.cat([group.scores for group in pruner.prune(sparsity=0.5, calibration=[X]).groups]))
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])
    with pytest.raises(PruningError, match=r"calibration=…"):
        pruner.prune(sparsity=0.6)


def test_calibration_runs_in_eval_mode_and_leaves_statistics_and_modes_alone():
    model = mlp(norm=True, dropout=0.5)
    model[3].eval()
    modes = [m.training for m in model.modules()]
    statistics = model[1].running_mean.clone()
    report = tnvp.Pruner(model, example_inputs=X).prune(sparsity=0.5, calibration=[X + 3])
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model[1].running_mean, statistics[report.groups[0].kept])


def test_a_batch_of_one():
    model = mlp(norm=True)
    pruner = tnvp.Pruner(model, example_inputs=X[:1])
    with pruner.record(), torch.no_grad():
        model.eval()
        for x in X:
            model(x[None])
    assert pruner.prune(sparsity=0.5, calibration=[x[None] for x in X]).neuron_sparsity > 0.5
    with pytest.raises(PruningError, match="at least 2"):
        tnvp.Pruner(mlp(), example_inputs=X[:1]).prune(sparsity=0.5, calibration=[X[:1]])


# ==== All or nothing ====


def in_training(**options):
    """(model, optimizer with momentum, averaged copy, pruner), a step old, gradients in place."""
    model = mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    loss(model).backward()
    optimizer.step()
    averaged.update_parameters(model)
    return model, optimizer, averaged, pruner_of(model, optimizer=optimizer, averaged=[averaged], **options)


@pytest.mark.parametrize("step", ["plan", "plan_migration"])
def test_when_a_step_of_surgery_fails_everything_is_as_before(step, monkeypatch):
    model, optimizer, averaged, pruner = in_training()
    snapshot = Snapshot(model, optimizer, averaged)

    def fail(*_):
        raise PruningError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(f"tnvp.pruning.pruner.{step}", fail)
        with pytest.raises(PruningError, match="on purpose"):
            pruner.prune(sparsity=0.5)
    snapshot.assert_untouched()
    assert [group.size for group in pruner.groups] == [11, 9, 4]
    pruner.prune(sparsity=0.5)
    assert widths(model) == widths(averaged) == [5, 4, 4]


def test_an_averaged_model_of_another_shape_is_refused_and_nothing_changed():
    model, optimizer, _, pruner = in_training()
    pruner.averaged = [mlp((7, 5, 4))]
    snapshot = Snapshot(model, optimizer, *pruner.averaged)
    with pytest.raises(PruningError, match="averaged"):
        pruner.prune(sparsity=0.5)
    snapshot.assert_untouched()


def test_an_optimizer_that_lost_parameters_meanwhile_is_refused_or_served_but_nothing_in_between():
    model, _, _, pruner = in_training()
    pruner.optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    snapshot = Snapshot(model, pruner.optimizer)
    try:
        pruner.prune(sparsity=0.5)
    except PruningError:
        snapshot.assert_untouched()
    else:
        assert pruner.optimizer.param_groups[0]["params"][0] is model[0].weight


# ==== Everything a training loop holds goes on ====


def test_modules_their_modes_hooks_dtype_and_frozen_parameters_survive():
    model = mlp(norm=True).to(torch.float64)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[3].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model[3].register_full_backward_hook(lambda *_: calls.append("backward"))
    before = [(id(m), m.training) for m in model.modules()]
    frozen = {name: p.requires_grad for name, p in model.named_parameters()}
    names = list(model.state_dict())
    pruner_of(model, X.double()).prune(sparsity=0.5, calibration=[X.double()])
    assert [(id(m), m.training) for m in model.modules()] == before
    assert {name: p.requires_grad for name, p in model.named_parameters()} == frozen
    assert list(model.state_dict()) == names
    assert {t.dtype for t in model.state_dict().values()} == {torch.float64, torch.int64}
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())
    calls.clear()
    loss(model, X.double()).backward()
    assert calls == ["forward", "pre", "backward"]


def test_memory_formats_survive():
    for model, x, layout in (
        (convnet(), IMAGES, torch.channels_last),
        (
            nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv3d(4, 2, 3)),
            torch.randn(1, 2, 6, 6, 6),
            torch.channels_last_3d,
        ),
    ):
        model.to(memory_format=layout)
        pruner_of(model, x).prune(sparsity=0.5)
        for layer in (m for m in model if isinstance(m, nn.Conv2d | nn.Conv3d)):
            assert layer.weight.is_contiguous(memory_format=layout)


def test_hooks_and_marks_on_a_parameter_survive():
    model, calls = mlp(), []
    model[2].weight.register_hook(lambda grad: calls.append(tuple(grad.shape)))
    model[2].weight.no_decay = True
    pruner_of(model).prune(sparsity=0.5)
    loss(model).backward()
    assert calls == [(4, 5)] and model[2].weight.no_decay


def test_gradients_are_cut_with_their_parameters():
    model = mlp(norm=True)
    loss(model).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model[4].bias.grad = None
    report = pruner_of(model).prune(sparsity=0.5)
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if name == "4.bias":
            assert parameter.grad is None
            continue
        expected = whole[name]
        if (layer, "out") in report.cuts:
            expected = expected[report.cuts[layer, "out"]]
        if kind == "weight" and (layer, "in") in report.cuts:
            expected = expected[:, report.cuts[layer, "in"]]
        assert torch.equal(parameter.grad, expected)


def test_pruning_between_micro_batches_loses_no_gradient():
    model = mlp((7, 8, 4)).double()
    x = X.double()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for m in (model, twin):
            m[2].weight[:, [1, 4, 5, 7]] = 0  # removing these changes nothing downstream
            m[0].weight[[1, 4, 5, 7]] *= 1e-3  # and l1 picks them
    loss(model, x[:6]).backward()
    assert pruner_of(model, x, optimizer=optimizer).prune(sparsity=0.5).groups[0].removed == [1, 4, 5, 7]
    loss(model, x[6:]).backward()
    optimizer.step()
    (loss(twin, x[:6]) + loss(twin, x[6:])).backward()
    kept = [0, 2, 3, 6]
    torch.testing.assert_close(model[0].weight, twin[0].weight[kept] - 0.1 * twin[0].weight.grad[kept])
    torch.testing.assert_close(model[2].weight, twin[2].weight[:, kept] - 0.1 * twin[2].weight.grad[:, kept])


def test_an_old_graph_alive_does_not_disturb_the_next_backward():
    model = mlp(norm=True)
    optimizer = torch.optim.Adam(model.parameters())
    kept_alive = loss(model)
    kept_alive.backward(retain_graph=True)
    pruner_of(model, optimizer=optimizer).prune(sparsity=0.5)
    assert tnvp.stale_leaves(model) == []
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    kept_alive.backward()  # the old graph itself still works, on the old parameters
    assert all(p.grad.shape == p.shape for p in model.parameters())


COPIES = {
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model, use_buffers=True),
    "ema by hand": copy.deepcopy,
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("compensation", ["none", "mean"])
def test_averaged_copies_are_cut_alike_and_go_on_averaging(name, compensation):
    model = mlp(norm=True, bias=False)
    averaged = COPIES[name](model)
    inner = getattr(averaged, "module", averaged)
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(torch.randn_like(parameter))
    old = copy.deepcopy(inner.state_dict())
    pruner = watched(model, compensation=compensation)
    pruner.averaged = [averaged]
    report = pruner.prune(sparsity=0.5)
    assert [n for n, _ in inner.named_parameters()] == [n for n, _ in model.named_parameters()]
    for key, tensor in inner.state_dict().items():
        layer, _, kind = key.rpartition(".")
        assert tensor.shape == model.state_dict()[key].shape
        if kind == "weight" and (layer, "in") in report.cuts and (layer, "out") in report.cuts:
            rows, columns = report.cuts[layer, "out"], report.cuts[layer, "in"]
            assert torch.equal(tensor, old[key][rows][:, columns]), "its own weights, cut alike"
    assert inner[1].num_features == 5 == inner[0].out_features
    averaged(X)
    if name == "AveragedModel":
        averaged.update_parameters(model)
        averaged.update_parameters(model)
    for old_value, new_value in zip(inner.parameters(), model.parameters(), strict=True):
        assert old_value.shape == new_value.shape and old_value is not new_value


def test_a_compiled_network_runs_the_new_shapes():
    model = mlp()
    fast = torch.compile(model, backend="eager")
    fast(X)
    pruner_of(model).prune(sparsity=0.5)
    assert torch.equal(fast(X), model(X))


def test_the_seed_makes_random_reproducible():
    kept = []
    for seed in (1, 1, 2):
        report = pruner_of(mlp(), criterion="random", seed=seed).prune(sparsity=0.5)
        kept.append([g.kept for g in report.groups])
    assert kept[0] == kept[1] != kept[2]


def test_pruning_draws_nothing_from_the_global_generator():
    model = mlp(dropout=0.5)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    pruner_of(model, criterion="random").prune(sparsity=0.5, calibration=[X])
    assert torch.equal(torch.rand(3), expected)


# ==== Groups by hand ====


class Untraceable(nn.Module):
    """Its path depends on the data, so torch.fx gives up."""

    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2, self.other = (
            nn.Linear(7, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 3),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        h = self.norm(self.fc1(x))
        h = h.relu() if x.sum() > 0 else h.tanh()
        return self.fc2(h) + self.other(h)


WHOLE = {"producers": ["fc1"], "passengers": ["norm"], "consumers": ["fc2", "other"]}


@pytest.mark.parametrize("budget", ["sparsity", "parameter_reduction", "flops_reduction"])
def test_an_untraceable_network_is_pruned_by_hand_made_groups(budget):
    model = stir(Untraceable()).double().eval()
    before = copy.deepcopy(model)
    x = X.double()
    pruner = watched(model, x, groups=[tnvp.NeuronGroup(**WHOLE)], compensation="none")
    report = pruner.prune(**{budget: 0.5}, calibration=[x])
    removed = report.groups[0].removed
    assert len(removed) >= 4 and model.norm.num_features == model.fc2.in_features == 8 - len(removed)
    for layer in (before.fc2, before.other):
        layer.weight.detach()[:, removed] = 0
    torch.testing.assert_close(model(x), before(x))


def test_hand_made_groups_fit_flattened_channels():
    model = convnet().double().eval()
    x = IMAGES.double()
    traced = copy.deepcopy(model)
    group = tnvp.NeuronGroup(producers=["4"], passengers=["5"], consumers=["9"])
    by_hand = pruner_of(model, x, groups=[group]).prune(sparsity=0.5)
    by_trace = pruner_of(traced, x, ignore=["0", "9"]).prune(sparsity=0.5)
    assert by_hand.groups[0].removed == by_trace.groups[0].removed
    assert torch.equal(model(x), traced(x))


INCOMPLETE = {
    "a forgotten consumer": [WHOLE | {"consumers": ["fc2"]}],
    "a forgotten passenger": [WHOLE | {"passengers": []}],
    "two groups of one producer": [
        WHOLE | {"consumers": ["fc2"]},
        WHOLE | {"consumers": ["other"], "name": "again"},
    ],
}


@pytest.mark.parametrize("name", INCOMPLETE)
@pytest.mark.parametrize("inputs", [X, None], ids=["with inputs", "calibration only"])
def test_groups_that_would_break_the_network_are_refused_and_nothing_changed(name, inputs):
    model = Untraceable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer)
    with pytest.raises(PruningError):
        groups = [tnvp.NeuronGroup(**fields) for fields in INCOMPLETE[name]]
        pruner = pruner_of(model, inputs, groups=groups, optimizer=optimizer, criterion="random")
        pruner.prune(sparsity=0.5, calibration=[X])
    snapshot.assert_untouched()


class Mixes(Untraceable):
    """Runs at any width, yet every neuron's result depends on the others."""

    def forward(self, x):
        h = self.norm(self.fc1(x)).softmax(-1) if x.sum() > 0 else self.norm(self.fc1(x)).softmax(1)
        return self.fc2(h) + self.other(h)


@pytest.mark.filterwarnings("error")
def test_groups_by_hand_with_a_mixer_between_are_refused_or_warned_of_before_anything_changed():
    model = Mixes()
    snapshot = Snapshot(model)
    with pytest.raises((PruningError, UserWarning), match="fc1"):
        pruner_of(model, groups=[tnvp.NeuronGroup(**WHOLE)]).prune(sparsity=0.5)
    snapshot.assert_untouched()


def test_groups_by_hand_may_not_cut_a_tied_weight_on_one_side():
    model = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[4].weight
    snapshot = Snapshot(model)
    with pytest.raises(PruningError, match="weight"):
        pruner_of(model, groups=[tnvp.NeuronGroup(producers=["0"], consumers=["2"])]).prune(sparsity=0.5)
    snapshot.assert_untouched()
    assert model[2].weight is model[4].weight


def test_groups_that_explain_gave_may_be_handed_in_and_their_verdicts_hold():
    model = mlp()
    groups = tnvp.explain(model, X)
    groups[0].prunable, groups[0].reason = False, "I say so"
    pruner_of(model, groups=groups).prune(sparsity=0.5)
    assert widths(model) == [11, 4, 4]


@dataclass
class Result:
    logits: torch.Tensor


class Packs(Untraceable):
    """Wraps its output in a class of its own."""

    def forward(self, x):
        return Result(super().forward(x))


def test_an_output_in_a_class_of_its_own_is_no_obstacle_or_a_clear_error():
    model = Packs()
    snapshot = Snapshot(model)
    try:
        report = pruner_of(model, groups=[tnvp.NeuronGroup(**WHOLE)]).prune(sparsity=0.5, calibration=[X])
    except PruningError:
        snapshot.assert_untouched()
    else:
        assert report.neuron_sparsity == 0.5 and report.output_error != 0, "unknown is None, not 0"


def test_a_network_that_cannot_be_copied_is_pruned_or_refused_in_words():
    model = mlp()
    model.lock = threading.Lock()
    snapshot = Snapshot(model)
    try:
        pruner_of(model).prune(sparsity=0.5)
    except PruningError as error:
        assert "cop" in str(error)
        snapshot.assert_untouched()
    else:
        assert widths(model) == [5, 4, 4]
