"""What consumers take over from removed neurons: a constant or a linear prediction, folded into their biases and weights.

Shapes: P positions of what a consumer reads, R of them removed and K kept, O its outputs. h is what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .atoms import along
from .attention import explicit_attention
from .channels import NeuronGroup, evaluating
from .errors import PruningError
from .layers import (
    ATTENTION,
    TRANSPOSED,
    channel_dim,
    kind_of,
    layer_input,
    reading_weight,
    response_to_constant,
    tensor_of,
    width,
    with_layer_input,
)
from .moments import as_samples
from .obs import DAMPING
from .recorder import Recorder

COMPENSATIONS: dict[str, str | None] = {  # name → the signal it needs
    "none": None,
    "act_of_mean": "preactivation",
    "mean": "activation",
    "affine": "covariance",
}


@dataclass(frozen=True)
class StandIn:
    """What takes the place of the positions that one consumer loses: h_R := constant + linear · h_K.

    ``linear`` [R/L, K/L] works between channels that have ``features`` = L positions each, the same at every one of these.
    """

    removed: Tensor  # [R]
    kept: Tensor  # [K]
    constant: Tensor  # [R]
    linear: Tensor | None = None
    features: int = 1

    @property
    def is_nothing(self) -> bool:
        return self.linear is None and not bool(self.constant.any())

    def predicted(self, h: Tensor) -> Tensor:
        """What stands at the removed positions [R, …] where ``h`` [P, …] is read."""
        constant = along(self.constant.to(h), 0, h.dim())
        shape = (len(self.removed), *h.shape[1:])
        if self.linear is None:
            return constant.expand(shape)
        known = h[self.kept.to(h.device)].reshape(len(self.linear.T), -1)
        return constant + (self.linear.to(h) @ known).reshape(shape)


def stand_ins(
    name: str,
    model: nn.Module,
    groups: Iterable[NeuronGroup],
    kept: dict[str, Tensor],
    recorder: Recorder,
    example_inputs: tuple | None,
) -> dict[str, StandIn]:
    """Consumer → what takes the place of the positions it loses; ``kept``: consumer → positions [K] that stay.

    ``mean``: E[h_R]. ``act_of_mean``: act(E[z]), what it would read if every producer wrote its mean (the demo's; by Jensen's
    inequality not the mean behind a curved activation). ``affine``: E[h_R] + B(h_K − E[h_K]) with B = C_RK (C_KK + λI)⁻¹, the
    least-squares prediction from what stays. ``none``: 0.
    """
    if name == "none":
        return uniform_stand_ins(model, kept, lambda module: 0.0)
    if name == "affine":
        widths = {consumer: width(model.get_submodule(consumer), "in") for consumer in kept}
        return {consumer: _affine(recorder, consumer, kept[consumer], size) for consumer, size in widths.items()}
    if name == "mean":
        constants = {consumer: _mean(recorder, consumer, "in") for consumer in kept}
    else:
        constants = _act_of_mean(model, list(groups), recorder, example_inputs)
    return {consumer: constant_stand_in(constants[consumer], kept[consumer]) for consumer in kept}


def uniform_stand_ins(
    model: nn.Module, kept: dict[str, Tensor], value: Callable[[nn.Module], float]
) -> dict[str, StandIn]:
    """Consumer → the one constant ``value(consumer)`` at every position that it loses."""
    stand_ins = {}
    for name, stays in kept.items():
        module = model.get_submodule(name)
        stand_ins[name] = constant_stand_in(torch.full((width(module, "in"),), value(module)), stays)
    return stand_ins


def constant_stand_in(constant: Tensor, kept: Tensor) -> StandIn:
    """Constants [P] for the positions that are not in ``kept``."""
    removed = complement(kept, len(constant))
    return StandIn(removed, kept, constant[removed.to(constant.device)])


def complement(kept: Tensor, size: int) -> Tensor:
    """The indices below ``size`` that are not in ``kept``, in order."""
    gone = torch.ones(size, dtype=torch.bool)
    gone[kept] = False
    return gone.nonzero().flatten()


def _mean(recorder: Recorder, layer: str, side: str) -> Tensor:
    moments = recorder.moments((layer, side))
    if moments.count == 0:
        raise PruningError(
            f"nothing was recorded at {layer!r}, so its mean is unknown: run your loop inside `with pruner.record():`, "
            'pass prune(calibration=…), or use compensation="none"'
        )
    moments.require_finite(layer)
    return moments.mean


def _affine(recorder: Recorder, consumer: str, kept: Tensor, size: int) -> StandIn:
    mean, removed = _mean(recorder, consumer, "in").double().cpu(), complement(kept, size)
    found = recorder.covariance(consumer)
    if found is None or len(kept) == 0:
        return StandIn(removed, kept, mean[removed])
    covariance, features = found[0].double().cpu(), found[1]
    gone, stay = removed[::features] // features, kept[::features] // features
    linear = regression(covariance, gone, stay)
    expected = (linear @ mean[kept].reshape(-1, features)).flatten()
    return StandIn(removed, kept, mean[removed] - expected, linear, features)


def regression(covariance: Tensor, removed: Tensor, kept: Tensor) -> Tensor:
    """B = C_RK (C_KK + λI)⁻¹ [R, K]: the ridge prediction of what is removed from what is kept."""
    inner = covariance[kept][:, kept]
    ridge = DAMPING * covariance.diagonal().mean()
    if not bool(ridge > 0):
        return covariance.new_zeros(len(removed), len(kept))
    inner = inner + ridge * torch.eye(len(kept), dtype=inner.dtype)
    return torch.linalg.solve(inner, covariance[kept][:, removed]).T


def _act_of_mean(model: nn.Module, groups: list[NeuronGroup], recorder: Recorder, example_inputs) -> dict[str, Tensor]:
    """One forward pass in eval mode in which every producer writes E[z], and the consumers tell what they read.

    What heads of attention give stands at no activation: their mean is taken.
    """
    if example_inputs is None:
        raise PruningError('compensation="act_of_mean" runs the network: give the Pruner example_inputs')
    modules = dict(model.named_modules())
    producers = [p for g in groups for p in g.producers if kind_of(modules[p]) is not ATTENTION]
    means = {name: _mean(recorder, name, "out") for name in producers}
    seen: dict[str, Tensor] = {}

    def write_mean(name):
        def hook(module, inputs, output):
            return along(means[name].to(output), channel_dim(module, output), output.dim()).expand_as(output)

        return hook

    def read(name):
        def hook(module, args, kwargs):
            x = tensor_of(layer_input(args, kwargs))
            seen[name] = as_samples(x.detach(), channel_dim(module, x)).double().mean(0)

        return hook

    handles = [modules[name].register_forward_hook(write_mean(name)) for name in means]
    consumers = dict.fromkeys(name for group in groups for name in group.consumers)
    handles += [modules[name].register_forward_pre_hook(read(name), with_kwargs=True) for name in consumers]
    try:
        with evaluating(model), explicit_attention(model), torch.no_grad():
            model(*example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    heads = [c for g in groups for c in g.consumers if any(kind_of(modules[p]) is ATTENTION for p in g.producers)]
    return seen | {name: _mean(recorder, name, "in") for name in heads}


def compensated(module: nn.Module, stand_in: StandIn) -> dict[str, Tensor]:
    """The consumer's weights and biases that change when it takes the stand-in over, by name; still of full size.

    b + W_R c, and W_K + W_R B. For a convolution the first sum runs over the kernel too: exact wherever the kernel does not
    overlap the zero padding.
    """
    changed = {}
    if stand_in.is_nothing:
        return changed
    for name, bias_name in kind_of(module).folds.items():
        weight, bias = getattr(module, name), getattr(module, bias_name)
        response = response_to_constant(module, name)[:, stand_in.removed.to(weight.device)]
        shift = response @ stand_in.constant.to(response)
        changed[bias_name] = (shift if bias is None else bias.detach().double() + shift).to(weight.dtype)
        if stand_in.linear is not None:
            changed[name] = _with_predictions(module, name, stand_in)
    return changed


def _with_predictions(module: nn.Module, name: str, stand_in: StandIn) -> Tensor:
    weight = reading_weight(module, name).double()
    removed, kept = stand_in.removed.to(weight.device), stand_in.kept.to(weight.device)
    by_channel = weight[:, removed].reshape(len(weight), len(removed) // stand_in.features, -1)
    added = torch.einsum("orx,rk->okx", by_channel, stand_in.linear.to(weight))
    weight = weight.index_add(1, kept, added.reshape(len(weight), len(kept), *weight.shape[2:]))
    weight = weight.transpose(0, 1) if kind_of(module) is TRANSPOSED else weight
    old = getattr(module, name)
    return torch.empty_like(old).copy_(weight)


@contextmanager
def replacing(model: nn.Module, replaced: dict[str, StandIn]) -> Iterator[None]:
    """The masked network that surgery must equal: inside, each consumer reads its stand-in at the removed positions."""
    modules = dict(model.named_modules())

    def hook(name, module, args, kwargs):
        x, stand_in = tensor_of(layer_input(args, kwargs)), replaced[name]
        h = x.movedim(channel_dim(module, x), 0)
        h = h.index_copy(0, stand_in.removed.to(x.device), stand_in.predicted(h))
        return with_layer_input(args, kwargs, h.movedim(0, channel_dim(module, x)))

    handles = [modules[name].register_forward_pre_hook(partial(hook, name), with_kwargs=True) for name in replaced]
    try:
        with explicit_attention(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
