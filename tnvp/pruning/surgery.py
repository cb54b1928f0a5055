"""Smaller parameters in place of the old ones: first a plan, in which anything may fail, then its execution, which can't.

Assigning to ``.data`` would keep the leaf and its AccumulateGrad node, which remembers the old shape, and the next backward
fails. Every changed parameter is therefore a new `nn.Parameter`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import become_explicit
from .channels import NeuronGroup
from .compensation import StandIn, compensated
from .layers import ATTENTION, kind_of, synchronise_sizes

Cuts = dict[tuple[str, str], Tensor]  # (layer, "in" or "out") → positions to keep of that dimension


@dataclass(frozen=True)
class ParameterChange:
    """One tensor of one layer: ``new`` is cut like ``old`` indexed by ``kept`` (dimension → index), or a bias new beside ``beside``."""

    layer: str
    tensor: str
    old: Tensor | None
    new: Tensor
    kept: dict[int, Tensor]
    beside: nn.Parameter | None = None


def cuts_for(groups: Iterable[NeuronGroup], kept: dict[str, Tensor]) -> Cuts:
    """The positions that stay in every dimension touched by a group that loses neurons."""
    alive: dict[tuple[str, str], Tensor] = {}
    for group in groups:
        if group.name not in kept or len(kept[group.name]) == group.size:
            continue
        stays = torch.zeros(group.size, dtype=torch.bool)
        stays[kept[group.name]] = True
        for where, neuron in group.maps.items():
            mask = (neuron < 0) | stays[neuron.clamp(min=0)]
            alive[where] = alive.get(where, True) & mask
    return {where: mask.nonzero().flatten() for where, mask in alive.items()}


def plan(model: nn.Module, cuts: Cuts, stand_ins: dict[str, StandIn]) -> list[ParameterChange]:
    """All tensors that change, already made; the model is untouched.

    Each consumer in ``stand_ins`` takes over what stands in for the positions it loses.
    """
    changes = []
    for name, module in model.named_modules():
        sides = {side: cuts[name, side] for side in ("out", "in") if (name, side) in cuts}
        if not sides:
            continue
        kind = kind_of(module)
        taken = compensated(module, stand_ins[name]) if name in stand_ins and "in" in sides else {}
        for tensor in dict.fromkeys([*kind.outputs, *kind.inputs, *kind.folds.values()]):
            old = getattr(module, tensor, None)
            dims = {table[tensor]: sides[side] for side, table in (("out", kind.outputs), ("in", kind.inputs))
                    if side in sides and tensor in table}  # fmt: skip
            source = taken.get(tensor, old)
            if source is not None and (dims or source is not old):
                beside = getattr(module, next(iter(kind.folds))) if old is None else None
                changes.append(_change(name, tensor, old, source, dims, beside))
    return changes


def _change(name, tensor, old, source, dims, beside) -> ParameterChange:
    new = cut_tensor(source, dims)
    if not isinstance(old, nn.Parameter) and old is not None:
        return ParameterChange(name, tensor, old, new, dims)
    model_of = old if old is not None else beside
    parameter = nn.Parameter(new, requires_grad=model_of.requires_grad)
    if old is not None:
        if old.grad is not None:
            parameter.grad = cut_tensor(old.grad, dims)
        parameter.__dict__.update(old.__dict__)  # the user's marks, such as weight.no_decay
        parameter._backward_hooks = old._backward_hooks
        parameter._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    return ParameterChange(name, tensor, old, parameter, dims, beside)


def cut_tensor(tensor: Tensor, kept: dict[int, Tensor]) -> Tensor:
    """A new tensor with only the kept indices of each dimension, in the old memory format."""
    new = tensor.detach()
    for dim, index in kept.items():
        new = new.index_select(dim, index.to(new.device))
    new = new.clone(memory_format=torch.contiguous_format)
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
        new = new.contiguous(memory_format=layout)
    return new


def execute(model: nn.Module, changes: Iterable[ParameterChange], cuts: Cuts) -> None:
    """Put the planned tensors in place; names, hooks, device, dtype and training mode stay."""
    for change in changes:
        setattr(model.get_submodule(change.layer), change.tensor, change.new)
    for (layer, _), kept in cuts.items():
        module = model.get_submodule(layer)
        if kind_of(module) is ATTENTION:
            become_explicit(module)
        synchronise_sizes(module, len(kept))
