"""What consumers take over from removed neurons: the constants they were, folded into the next bias.

Shapes: P positions of what a consumer reads, O its outputs. A compensation gives the constant [P] that stands in for each
position; removed ones are replaced by it. With zeros (`none`) nothing is folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .channels import NeuronGroup, evaluating
from .errors import PruningError
from .layers import channel_dim, layer_input
from .moments import as_samples
from .recorder import Recorder

COMPENSATIONS: dict[str, str | None] = {  # name → the signal whose mean it needs
    "none": None,
    "act_of_mean": "preactivation",
    "mean": "activation",
}


def constants(
    name: str, model: nn.Module, groups: Iterable[NeuronGroup], recorder: Recorder, example_inputs: tuple | None
) -> dict[str, Tensor]:
    """Consumer → the constant [P] at each position it reads.

    ``mean``: E[h], the mean of what the consumer reads. ``act_of_mean``: act(E[z]), what it would read if every producer
    wrote its mean (the demo's; by Jensen's inequality not the mean behind a curved activation). ``none``: nothing.
    """
    if name == "mean":
        return {consumer: _mean(recorder, (consumer, "in")) for group in groups for consumer in group.consumers}
    if name == "act_of_mean":
        return _act_of_mean(model, list(groups), recorder, example_inputs)
    return {}


def _mean(recorder: Recorder, signal: tuple[str, str]) -> Tensor:
    moments = recorder.moments(signal)
    if moments.count == 0:
        raise PruningError(
            f"nothing was recorded at {signal[0]!r}, so its mean is unknown: run your loop inside `with pruner.record():`, "
            'pass prune(calibration=…), or use compensation="none"'
        )
    moments.require_finite(signal[0])
    return moments.mean


def _act_of_mean(model: nn.Module, groups: list[NeuronGroup], recorder: Recorder, example_inputs) -> dict[str, Tensor]:
    """One forward pass in eval mode in which every producer writes E[z], and the consumers tell what they read."""
    if example_inputs is None:
        raise PruningError('compensation="act_of_mean" runs the network: give the Pruner example_inputs')
    modules = dict(model.named_modules())
    means = {p: _mean(recorder, (p, "out")) for group in groups for p in group.producers}
    seen: dict[str, Tensor] = {}

    def write_mean(name):
        def hook(module, inputs, output):
            return along(means[name].to(output), channel_dim(module, output), output.dim()).expand_as(output)

        return hook

    def read(name):
        def hook(module, args, kwargs):
            x = layer_input(args, kwargs)
            seen[name] = as_samples(x.detach(), channel_dim(module, x)).double().mean(0)

        return hook

    handles = [modules[name].register_forward_hook(write_mean(name)) for name in means]
    consumers = dict.fromkeys(name for group in groups for name in group.consumers)
    handles += [modules[name].register_forward_pre_hook(read(name), with_kwargs=True) for name in consumers]
    try:
        with evaluating(model), torch.no_grad():
            model(*example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def folded_bias(module: nn.Module, constant: Tensor, removed: Tensor) -> Tensor:
    """The bias [O] after the removed positions' constants moved into it: b + W[:, R]·c[R].

    For a convolution the sum runs over the kernel too: exact wherever the kernel does not overlap the zero padding.
    """
    weight = module.weight.detach()
    columns = weight[:, removed.to(weight.device)].double()
    columns = columns.sum(tuple(range(2, columns.dim()))) if columns.dim() > 2 else columns
    shift = columns @ constant.to(columns)[removed.to(columns.device)]
    bias = module.bias.detach().double() if module.bias is not None else 0
    return (bias + shift).to(weight.dtype)


def along(values: Tensor, dim: int, dims: int) -> Tensor:
    """Values [P] shaped to lie along dimension ``dim`` of ``dims``."""
    return values.reshape([-1 if d == dim else 1 for d in range(dims)])


@contextmanager
def replacing(model: nn.Module, replaced: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The masked network that surgery must equal: inside, each consumer reads constants at its removed positions.

    ``replaced``: consumer → (removed positions, their constants).
    """
    modules = dict(model.named_modules())

    def hook(name, module, args, kwargs):
        x = layer_input(args, kwargs)
        removed, constant = replaced[name]
        dim = channel_dim(module, x)
        fixed = along(constant.to(x), dim, x.dim()).expand_as(x.index_select(dim, removed.to(x.device)))
        return (x.index_copy(dim, removed.to(x.device), fixed),), {}

    handles = [modules[name].register_forward_pre_hook(partial(hook, name), with_kwargs=True) for name in replaced]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
