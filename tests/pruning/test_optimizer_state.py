"""Optimizers follow surgery: state is cut with its parameter, everything else about the optimizer stays."""

import copy

import pytest
import torch
from torch import nn

import tnvp
from tnvp.pruning.errors import PruningError

from .networks import mlp

X = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
CUTTABLE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def learn(model: nn.Module, optimizer, scheduler=None, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def prune(model: nn.Module, optimizer=None, sparsity: float = 0.5, compensation: str = "none", **options):
    pruner = tnvp.Pruner(
        model, optimizer=optimizer, example_inputs=X, criterion="l1", compensation=compensation, **options
    )
    return pruner.prune(sparsity=sparsity, calibration=[X])


def cut(tensor: torch.Tensor, name: str, report) -> torch.Tensor:
    """The part of a parameter-shaped tensor that survives."""
    layer, _, kind = name.rpartition(".")
    if (layer, "out") in report.cuts:
        tensor = tensor[report.cuts[layer, "out"]]
    if kind == "weight" and (layer, "in") in report.cuts:
        tensor = tensor[:, report.cuts[layer, "in"]]
    return tensor


# ==== What stays, what is cut ====


@pytest.mark.parametrize("name", CUTTABLE)
def test_state_shaped_like_its_parameter_is_cut_and_the_rest_stays(name):
    model = mlp(norm=True)
    optimizer = CUTTABLE[name](model.parameters())
    learn(model, optimizer, steps=2)
    old = {n: copy.deepcopy(dict(optimizer.state[p])) for n, p in model.named_parameters()}
    shapes = {n: p.shape for n, p in model.named_parameters()}
    report = prune(model, optimizer)
    shrunk = [n for n, p in model.named_parameters() if p.shape != shapes[n]]
    assert len(shrunk) == 9  # two weights cut on each side but the ends, biases, batch norms
    for n, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state.keys() == old[n].keys()
        for key, value in state.items():
            before = old[n][key]
            if isinstance(before, torch.Tensor) and before.shape == shapes[n]:
                assert torch.equal(value, cut(before, n, report)), (n, key)
                assert value.dtype == before.dtype
            else:
                assert (
                    torch.equal(torch.as_tensor(value), torch.as_tensor(before))
                    if before is not None
                    else value is None
                )
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}, "nothing of the old ones is left"
    held = [id(p) for p in optimizer.param_groups[0]["params"]]
    assert held == [id(p) for p in model.parameters()], "each once, in the old order"
    learn(model, optimizer)


def test_groups_keep_their_order_members_and_options():
    model = mlp(bias=False)
    groups = [
        {"params": [model[4].weight], "lr": 0.3},
        {"params": [model[2].weight, model[0].weight], "weight_decay": 0.1, "mine": "kept"},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    learn(model, optimizer)
    group_objects = list(optimizer.param_groups)
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    prune(model, optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups, group_objects, strict=True)), "schedulers hold these"
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == options
    expected = [[model[4].weight], [model[2].weight, model[0].weight]]
    for group, members in zip(optimizer.param_groups, expected, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in members]


def test_parameters_the_optimizer_never_held_stay_out():
    model = mlp()
    optimizer = torch.optim.SGD([model[4].weight, model[2].bias], lr=0.1)
    prune(model, optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model[4].weight), id(model[2].bias)]


def test_parameters_of_other_networks_stay_in():
    model, other = mlp(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*other.parameters(), *model.parameters()])
    learn(model, optimizer)
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state[other.weight])
    prune(model, optimizer)
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], other.parameters(), strict=False))
    assert torch.equal(optimizer.state[other.weight]["exp_avg"], state["exp_avg"])


def test_state_that_belongs_to_no_parameter_stays():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["rounds"] = 7
    prune(model, optimizer)
    assert optimizer.state["rounds"] == 7


def test_names_in_the_optimizer_follow():
    model = mlp(bias=False)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    prune(model, optimizer, compensation="mean")
    group = optimizer.param_groups[0]
    assert {n: id(p) for n, p in zip(group["param_names"], group["params"], strict=True)} == {
        n: id(p) for n, p in model.named_parameters()
    }


# ==== The bias that compensation creates ====


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_created_bias_is_in_its_weights_group_with_the_state_of_a_fresh_parameter(name):
    model = mlp(bias=False)
    make = CUTTABLE[name]
    optimizer = make([{"params": [model[0].weight]}, {"params": [model[4].weight, model[2].weight], "lr": 0.007}])
    learn(model, optimizer)
    prune(model, optimizer, compensation="mean")
    assert model[0].bias is None, "it reads the data"
    members = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert members[0] == [id(model[0].weight)]
    assert sorted(members[1]) == sorted(id(p) for layer in (model[2], model[4]) for p in layer.parameters())
    bias = model[4].bias
    fresh = make([nn.Parameter(torch.zeros_like(bias))])
    fresh_state = dict(fresh.state).get(fresh.param_groups[0]["params"][0], {})
    state = dict(optimizer.state).get(bias, {})
    assert state.keys() == fresh_state.keys()
    for key, value in fresh_state.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
    before = bias.detach().clone()
    learn(model, optimizer)
    assert not torch.equal(bias, before), "and it learns"


def test_a_created_bias_is_trained_or_frozen_as_its_weight_is():
    model = mlp(bias=False)
    model[4].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    prune(model, optimizer, compensation="mean")
    assert not model[4].bias.requires_grad and model[2].bias.requires_grad
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert id(model[2].bias) in held and id(model[4].bias) not in held


# ==== Refused before anything changed ====


class Factored(torch.optim.SGD):
    """Keeps a state of another shape than its parameter's, as Shampoo and its kin do."""

    def __init__(self, params, state):
        super().__init__(params, lr=0.1)
        self.make = state

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["odd"] = self.make(p)


REFUSED = {
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "a flat state": lambda p: Factored(p, lambda q: q.detach().flatten()[:3].clone()),
    "a list of states": lambda p: Factored(p, lambda q: [torch.ones_like(q)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_cannot_be_cut_is_refused_before_anything_changed(name):
    model = mlp()
    optimizer = REFUSED[name](model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    leaves, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(PruningError, match=f"{type(optimizer).__name__}.*(flat|shape|list)"):
        prune(model, optimizer)
    assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(optimizer_state)
    optimizer.step(closure)


def test_without_state_yet_there_is_nothing_to_refuse():
    model = mlp()
    optimizer = torch.optim.Adafactor(model.parameters())
    prune(model, optimizer)
    learn(model, optimizer)
    assert not any(p.grad is None for p in optimizer.param_groups[0]["params"])


def test_an_optimizer_of_another_copy_is_refused_at_once():
    model = mlp()
    with pytest.raises(PruningError, match="none of the model's parameters"):
        tnvp.Pruner(model, optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1), example_inputs=X)


# ==== What wraps an optimizer goes on ====

SCHEDULERS = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("compensation", ["none", "mean"])
def test_learning_rate_schedulers_go_on_as_if_nothing_happened(name, compensation):
    rates = []
    for pruned in (False, True):
        model = mlp(bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        rates.append([])
        for step in range(8):
            if pruned and step == 3:
                prune(model, optimizer, compensation=compensation)
            before = [p.detach().clone() for p in model.parameters()]
            learn(model, optimizer, scheduler)
            assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "all learn"
            rates[-1].append((scheduler.get_last_lr(), optimizer.param_groups[0]["momentum"]))
    assert rates[0] == rates[1]


def test_a_gradient_scaler_goes_on():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(X).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    step()
    prune(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_hooks_on_the_optimizer_stay():
    model, calls = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    prune(model, optimizer)
    learn(model, optimizer)
    assert calls == [1]


def test_a_saved_optimizer_of_the_pruned_network_loads_into_a_new_one():
    model = mlp(bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learn(model, optimizer)
    prune(model, optimizer, compensation="mean")
    learn(model, optimizer)
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(optimizer_order(optimizer, model, twin), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors otherwise
    learn(model, optimizer)
    learn(twin, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def optimizer_order(optimizer, model: nn.Module, twin: nn.Module) -> list[nn.Parameter]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [twin.get_parameter(names[id(p)]) for p in optimizer.param_groups[0]["params"]]
