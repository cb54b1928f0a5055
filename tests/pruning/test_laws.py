"""The laws of surgery: rebuilt equals masked, training goes on as if masked, zero is the identity, all or nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.utils import prune as masks

import tnvp
from tnvp.pruning import compensation as compensations
from tnvp.pruning.compensation import StandIn, replacing

from .networks import convnet, masked_twin, mlp, stir

NETWORKS = {
    "mlp": (lambda: mlp(), (7,)),
    "mlp_batch_norm_dropout": (lambda: mlp(norm=True, dropout=0.3), (7,)),
    "mlp_sigmoid_without_bias": (lambda: mlp(activation=nn.Sigmoid, bias=False), (7,)),
    "convnet": (convnet, (3, 16, 16)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd_nesterov_decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


def trained(network: str, optimizer: str = "sgd_momentum", steps: int = 4):
    """(model, optimizer, pruner's example inputs, a function giving the i-th batch), float64, a few steps old."""
    torch.manual_seed(3)
    build, shape = NETWORKS[network]
    model = stir(build()).double()
    made = OPTIMIZERS[optimizer](model.parameters())

    def batch(i: int):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(16, *shape, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 4, (16,), generator=generator)

    step(model, made, batch, range(steps))
    return model, made, batch


def step(model, optimizer, batch, numbers) -> None:
    for i in numbers:
        x, y = batch(i)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def recorded(model, batch, **options) -> tnvp.Pruner:
    pruner = tnvp.Pruner(model, example_inputs=batch(0)[0], **options)
    with pruner.record(), torch.no_grad():
        for i in range(3):
            model(batch(i)[0])
    return pruner


@pytest.mark.parametrize("compensation", ["none", "act_of_mean", "mean"])
@pytest.mark.parametrize("network", NETWORKS)
def test_rebuilt_equals_masked(network, compensation, monkeypatch):
    model, _, batch = trained(network)
    model.eval()
    before = copy.deepcopy(model)
    used = spy_on_stand_ins(monkeypatch)
    report = recorded(model, batch, compensation=compensation).prune(sparsity=0.6)
    x = batch(99)[0]
    assert used.keys() == {layer for layer, side in report.cuts if side == "in"}
    with replacing(before, used):
        expected = before(x)
    assert report.neuron_sparsity == pytest.approx(0.6, abs=0.05)
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in before.parameters())
    torch.testing.assert_close(model(x), expected, rtol=1e-8, atol=1e-10)


def spy_on_stand_ins(monkeypatch) -> dict[str, StandIn]:
    """What stands in for removed neurons at the next event."""
    used: dict[str, StandIn] = {}
    real = compensations.stand_ins

    def spy(*args):
        used.update(real(*args))
        return used

    monkeypatch.setattr("tnvp.pruning.pruner.stand_ins", spy)
    return used


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", ["mlp", "mlp_batch_norm_dropout", "convnet"])
def test_steps_after_surgery_equal_steps_of_the_masked_network(network, optimizer, monkeypatch):
    model, made, batch = trained(network, optimizer)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # random masks of different shapes can't be equal
    used = spy_on_stand_ins(monkeypatch)
    before = copy.deepcopy(model)
    states = {name: copy.deepcopy(made.state[p]) for name, p in model.named_parameters() if p in made.state}
    report = recorded(model, batch, optimizer=made).prune(sparsity=0.5)
    twin = masked_twin(before, report, used)
    twin_optimizer = OPTIMIZERS[optimizer](twin.parameters())
    for name, state in states.items():
        twin_optimizer.state[twin.get_parameter(name)] = state
    if optimizer == "sgd_fused":  # wants a buffer for every parameter, the twin's new biases too
        for parameter in twin.parameters():
            twin_optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
    step(model, made, batch, range(50, 56))
    step(twin, twin_optimizer, batch, range(50, 56))
    wide = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        layer, _, tensor = name.rpartition(".")
        expected = wide[name].detach()
        if (layer, "out") in report.cuts:
            expected = expected[report.cuts[layer, "out"]]
        if tensor == "weight" and (layer, "in") in report.cuts:
            expected = expected[:, report.cuts[layer, "in"]]
        # The gradient of a bias before batch norm is pure rounding, which adaptive optimizers enlarge: hence atol.
        torch.testing.assert_close(
            parameter.detach(), expected, rtol=1e-7, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("network", NETWORKS)
def test_zero_sparsity_is_the_identity(network):
    model, _, batch = trained(network)
    pruner = recorded(model, batch)
    before = copy.deepcopy(model.state_dict())
    leaves = list(model.parameters())
    report = pruner.prune(sparsity=0.0)
    assert report.neuron_sparsity == 0 and report.flops_reduction == 0
    assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_two_optimizers_follow_together_and_one_left_out_is_told_of():
    for given in ("both", "one"):
        model, _, batch = trained("mlp")
        optimizers = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1:].parameters(), lr=0.1)]
        pruner = recorded(model, batch, optimizer=optimizers if given == "both" else optimizers[0])
        if given == "one":
            with pytest.warns(UserWarning, match=r"does not hold 2\.weight, 2\.bias, 4\.weight"):
                pruner.prune(sparsity=0.5)
            continue
        pruner.prune(sparsity=0.5)
        before = [p.detach().clone() for p in model.parameters()]
        nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert all((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_a_wrapper_is_refused_with_the_way_out(wrap):
    with pytest.raises(tnvp.PruningError, match=r"give the Pruner model\.(module|_orig_mod)"):
        tnvp.Pruner(wrap(mlp()), example_inputs=torch.randn(2, 7))


def test_a_forgotten_optimizer_is_told_of():
    model, _, batch = trained("mlp")
    with pytest.warns(UserWarning, match="knows no optimizer"):
        recorded(model, batch).prune(sparsity=0.5)


@pytest.mark.parametrize("layer", [2, 4])
def test_a_bias_that_a_hook_computes_would_lose_the_fold(layer):
    model = mlp().double()
    masks.l1_unstructured(model[layer], "bias", amount=1)
    model(torch.randn(8, 7, dtype=torch.float64))
    groups = {group.name: group for group in tnvp.explain(model, torch.randn(8, 7, dtype=torch.float64))}
    reader = groups["0" if layer == 2 else "2"]
    assert not reader.prunable and f"a hook computes {layer}.bias" in reader.reason
    with pytest.raises(tnvp.PruningError, match="a hook computes"):
        tnvp.Pruner(model, groups=[tnvp.NeuronGroup(producers=[str(layer - 2)], consumers=[str(layer)])])


def test_pruning_in_inference_mode_is_refused():
    model, _, batch = trained("mlp")
    pruner = recorded(model, batch)
    with torch.inference_mode(), pytest.raises(tnvp.PruningError, match="inference_mode"):
        pruner.prune(sparsity=0.5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_takes_no_new_bias_and_nothing_changes():
    model = mlp(bias=False)
    optimizer = torch.optim.Muon(model.parameters())
    before = list(model.parameters())
    x = torch.randn(8, 7)
    with pytest.raises(tnvp.PruningError, match="Muon"):
        tnvp.Pruner(model, optimizer=optimizer, example_inputs=x).prune(sparsity=0.5, calibration=[x])
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
