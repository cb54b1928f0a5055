"""Masks: shapes stay, removed neurons are zero and stay zero, and the masked network trains as the rebuilt one does.

And what crosses all modes: averaged copies, schedules, scalers, hooks, odd optimizers, export.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tnvp
from tnvp.pruning.compensation import complement
from tnvp.pruning.layers import kind_of

from .law import difference, prepared, trains
from .networks import convnet, mlp
from .test_architectures import depthwise, group_normed, joined_and_added, recurrent, resnext
from .test_attention import TOKENS, sequential_attention, transformer

VECTORS = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).double()
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()

NETWORKS = {
    "mlp": (lambda: mlp(norm=True), VECTORS),
    "without biases": (lambda: mlp(activation=nn.Sigmoid, bias=False), VECTORS),
    "convnet": (convnet, IMAGES),
    "residual, grouped": (resnext, IMAGES),
    "depthwise": (lambda: depthwise(2), IMAGES),
    "group norm": (group_normed, IMAGES[..., :8, :8]),
    "joined": (joined_and_added, VECTORS),
    "transformer": (transformer, TOKENS),
    "attention": (sequential_attention, TOKENS),
    "lstm": (lambda: recurrent(nn.LSTM, bidirectional=True), TOKENS),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


def made(name: str, optimizer: str = "sgd", steps: int = 3, **options):
    """(model, optimizer, pruner, inputs), a few steps old."""
    build, x = NETWORKS[name]
    model = prepared(build, (x,))
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    step(model, optimizer, x, steps)
    pruner = tnvp.Pruner(model, optimizer=optimizer, example_inputs=x, **{"criterion": "l2"} | options)
    return model, optimizer, pruner, x


def step(model, optimizer, x, count: int = 1) -> None:
    """Full-batch steps in eval mode: the same for masked and rebuilt, without random masks or batch statistics."""
    for i in range(count):
        optimizer.zero_grad(set_to_none=True)
        (model(x) - 0.3 * (i + 1)).square().mean().backward()
        optimizer.step()


def zeros(model, cuts) -> list[torch.Tensor]:
    """All that a mask holds at zero."""
    found = []
    for (layer, side), kept in cuts.items():
        module = model.get_submodule(layer)
        kind = kind_of(module)
        for tensor, dim in (kind.outputs if side == "out" else kind.inputs).items():
            if getattr(module, tensor, None) is not None:
                value = getattr(module, tensor)
                found.append(value.index_select(dim, complement(kept, value.shape[dim])))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "transformer", "depthwise"])
def test_masked_rows_are_zero_and_stay_zero_whatever_the_optimizer_does(name, optimizer):
    model, optimizer, pruner, x = made(name, optimizer)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    report = pruner.prune(sparsity=0.5, mode="mask", calibration=[x])
    assert sum(map(len, zeros(model, report.cuts))) > 0
    step(model.train(), optimizer, x, 4)
    step(model.eval(), optimizer, x, 2)
    assert {name: p.shape for name, p in model.named_parameters() if name in shapes} == shapes, "and new biases"
    assert all(not value.any() for value in zeros(model, report.cuts))
    assert report.neuron_sparsity == pruner.reductions()["neuron_sparsity"] > 0.3
    assert report.parameter_sparsity <= 0, "nothing has gone yet, and biases may have come"


@pytest.mark.parametrize("compensation", ["none", "mean", "affine"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_masked_network_computes_what_the_rebuilt_one_does(name, compensation):
    model, optimizer, pruner, x = made(name, compensation=compensation)
    twin, twin_optimizer, twin_pruner, _ = made(name, compensation=compensation)
    pruner.prune(sparsity=0.5, mode="mask", calibration=[x])
    twin_pruner.prune(sparsity=0.5, mode="rebuild", calibration=[x])
    assert difference(model(x), twin(x)) < 1e-10
    step(model, optimizer, x, 4)
    step(twin, twin_optimizer, x, 4)
    assert difference(model(x), twin(x)) < 1e-7


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "without biases", "convnet", "attention", "depthwise", "lstm"])
def test_steps_then_rebuild_equal_rebuild_then_steps(name, optimizer):
    found = []
    for rebuilds_first in (True, False):
        model, its_optimizer, pruner, x = made(name, optimizer)
        pruner.prune(sparsity=0.5, mode="mask", calibration=[x])
        if rebuilds_first:
            pruner.rebuild()
        step(model, its_optimizer, x, 4)
        if not rebuilds_first:
            pruner.rebuild()
        step(model, its_optimizer, x, 2)
        found.append(dict(model.named_parameters()))
        assert tnvp.stale_leaves(model) == []
    for parameter, expected in found[0].items():
        torch.testing.assert_close(found[1][parameter], expected, rtol=1e-6, atol=1e-8, msg=lambda m, n=parameter: f"{n}: {m}")  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_masks_grow_event_by_event_and_can_be_rebuilt_at_any_time(name):
    model, optimizer, pruner, x = made(name, mode="mask")
    sparsities = []
    for sparsity in (0.3, 0.5, 0.6):
        report = pruner.prune(sparsity=sparsity, calibration=[x])
        assert not any(value.any() for value in zeros(model, report.cuts))
        step(model, optimizer, x, 2)
        sparsities.append(report.neuron_sparsity)
    assert sparsities == sorted(sparsities) and sparsities[-1] > sparsities[0]
    masked = model(x).detach()
    parameters = sum(p.numel() for p in model.parameters())
    report = pruner.rebuild()
    assert difference(model(x).detach(), masked) < 1e-10
    assert sum(p.numel() for p in model.parameters()) < parameters
    assert report.neuron_sparsity == sparsities[-1] and report.parameter_sparsity > 0
    state = copy.deepcopy(model.state_dict())
    pruner.rebuild()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items()), "twice is once"
    trains(model, optimizer, (x,))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_mask_and_then_an_event_that_rebuilds(name):
    """What was masked and what the second event removes go together."""
    model, optimizer, pruner, x = made(name)
    pruner.prune(sparsity=0.3, mode="mask", calibration=[x])
    step(model, optimizer, x, 2)
    report = pruner.prune(sparsity=0.6, mode="rebuild", calibration=[x])
    assert report.certificate.disagreement == ""
    assert report.neuron_sparsity == pruner.reductions()["neuron_sparsity"] > 0.4
    widths = {g.name: g.size for g in pruner.groups if g.prunable}
    assert widths == pruner.widths
    trains(model, optimizer, (x,))


def test_a_mask_between_micro_batches_keeps_the_gradient_of_what_stays():
    grads = []
    for mode in ("mask", "rebuild"):
        model, optimizer, pruner, x = made("mlp", mode=mode, compensation="none")
        optimizer.zero_grad()
        model(x[:3]).square().sum().backward()
        pruner.prune(sparsity=0.5)
        model(x[3:]).square().sum().backward()
        pruner.rebuild()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-9, atol=1e-12)


def test_a_gradient_penalty_sees_through_a_mask():
    gradients = []
    for mode in ("mask", "rebuild"):
        model, optimizer, pruner, x = made("mlp", mode=mode)
        pruner.prune(sparsity=0.5, calibration=[x])
        optimizer.zero_grad()
        first = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
        pruner.rebuild()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert sum(float(g.abs().sum()) for g in gradients[1].values()) > 0
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=lambda m, n=name: f"{n}: {m}")


# ==== Averaged copies ====


@pytest.mark.parametrize("mode", ["mask", "rebuild"])
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("name", ["mlp", "attention", "depthwise"])
def test_averaged_copies_follow_and_go_on(name, use_buffers, mode):
    model, optimizer, _, x = made(name)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    step(model, optimizer, x, 2)
    ema.update_parameters(model)
    pruner = tnvp.Pruner(model, optimizer=optimizer, example_inputs=x, criterion="l2", averaged=[ema], mode=mode)
    report = pruner.prune(sparsity=0.5, calibration=[x])
    step(model, optimizer, x, 2)
    ema.update_parameters(model)
    assert [p.shape for p in ema.module.parameters()] == [p.shape for p in model.parameters()]
    if mode == "mask":
        assert not any(value.any() for value in zeros(ema.module, report.cuts))
        pruner.rebuild()
    step(model, optimizer, x, 1)
    ema.update_parameters(model)
    assert ema(x).isfinite().all() and ema(x).shape == model(x).shape


# ==== The rest of a training loop ====


@pytest.mark.parametrize("mode", ["mask", "rebuild"])
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_schedules_groups_and_hooks_go_on(name, mode):
    build, x = NETWORKS[name]
    model = prepared(build, (x,))
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "lr": 0.02, "weight_decay": 0.1}, {"params": others, "lr": 0.01}]
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=9)
    seen = []
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.register_forward_hook(lambda m, i, o: seen.append(("forward", o.shape[-1])))
    layer.register_full_backward_hook(lambda m, i, o: seen.append(("backward", o[0].shape[-1])))
    for _ in range(3):
        step(model, optimizer, x), schedule.step()
    pruner = tnvp.Pruner(model, optimizer=optimizer, example_inputs=x, criterion="l2", mode=mode)
    pruner.prune(sparsity=0.5, calibration=[x])
    seen.clear()
    for _ in range(3):
        step(model, optimizer, x), schedule.step()
    assert seen.count(("forward", layer.out_features)) == seen.count(("backward", layer.out_features)) == 3
    first, second = optimizer.param_groups
    assert second["lr"] == pytest.approx(first["lr"] / 2) and first["weight_decay"] == 0.1
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_a_gradient_scaler_goes_on(name):
    build, x = NETWORKS[name]
    model, x = prepared(build, (x,)).float(), x.float()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.amp.GradScaler("cpu")

    def scaled_step():
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    scaled_step()
    pruner = tnvp.Pruner(model, optimizer=optimizer, example_inputs=x, criterion="l2")
    pruner.prune(sparsity=0.5, calibration=[x])
    before = [p.detach().clone() for p in model.parameters()]
    scaled_step()
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturable optimizers live on a GPU")
def test_a_capturable_optimizer_goes_on():
    model, x = mlp().cuda(), VECTORS.float().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    step(model, optimizer, x, 2)
    tnvp.Pruner(model, optimizer=optimizer, example_inputs=x, criterion="l2").prune(sparsity=0.5, calibration=[x])
    trains(model, optimizer, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["mlp", "convnet", "attention", "residual, grouped"])
def test_other_dtypes_stay_and_the_network_runs(name, dtype):
    build, x = NETWORKS[name]
    x = x.to(dtype)
    model = prepared(build, (NETWORKS[name][1],)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = copy.deepcopy(model)
    pruner = tnvp.Pruner(model, optimizer=optimizer, example_inputs=x, criterion="l2", compensation="none")
    report = pruner.prune(sparsity=0.5, calibration=[x])
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert abs(report.certificate.predicted - report.certificate.measured) < (0.1 if dtype == torch.bfloat16 else 1e-4)
    assert difference(model(x), before(x)) > 0
    trains(model, optimizer, (x,))


@pytest.mark.parametrize("mode", ["mask", "rebuild"])
def test_channels_last_stays(mode):
    model = prepared(convnet, (IMAGES,)).to(memory_format=torch.channels_last)
    x = IMAGES.to(memory_format=torch.channels_last)
    pruner = tnvp.Pruner(model, example_inputs=x, criterion="l2", mode=mode)
    pruner.prune(sparsity=0.5, calibration=[x])
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in model if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize(
    "name", ["mlp", "convnet", "residual, grouped", "depthwise", "group norm", "attention", "lstm"]
)
def test_a_pruned_network_can_be_exported(name):
    model, _, pruner, x = made(name)
    pruner.prune(sparsity=0.5, calibration=[x])
    model.eval()
    with torch.no_grad():
        assert difference(torch.export.export(model, (x,)).module()(x), model(x)) < 1e-12


def test_a_parametrized_layer_is_refused_with_the_way_out_and_pruned_after_it():
    model = mlp(widths=(7, 9, 8, 3)).double()
    nn.utils.parametrizations.weight_norm(model[2])
    groups = {g.name: g for g in tnvp.explain(model, VECTORS)}
    assert not groups["0"].prunable and "remove_parametrizations" in groups["0"].reason
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    report = tnvp.Pruner(model, example_inputs=VECTORS, criterion="l2", compensation="none").prune(sparsity=0.5)
    assert report.neuron_sparsity > 0.4
