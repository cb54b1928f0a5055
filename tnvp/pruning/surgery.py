"""New parameters in place of the old ones: first a plan, in which anything may fail, then its execution, which can't.

Mode "rebuild" makes them smaller; "mask" keeps their shapes and makes zero what would have gone, for as long as it trains.

Assigning to ``.data`` would keep the leaf and its AccumulateGrad node, which remembers the old shape, and the next backward
fails. Every changed parameter is therefore a new `nn.Parameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .attention import become_explicit, leave_nesting
from .channels import NeuronGroup
from .compensation import StandIn, compensated, complement
from .errors import PruningError
from .layers import ATTENTION, kind_of, synchronise_sizes

Cuts = dict[tuple[str, str], Tensor]  # (layer, "in" or "out") → positions to keep of that dimension


@dataclass(frozen=True)
class ParameterChange:
    """One tensor of one layer: ``new`` follows from ``old`` by ``kept`` (dimension → index), or is a bias new beside ``beside``."""

    layer: str
    tensor: str
    old: Tensor | None
    new: Tensor
    kept: dict[int, Tensor]
    beside: nn.Parameter | None = None
    mode: str = "rebuild"

    def follow(self, tensor: Tensor) -> Tensor:
        """What a tensor shaped like ``old``, such as a gradient or a momentum, becomes."""
        return MODES[self.mode](tensor, self.kept)


def cuts_for(groups: Iterable[NeuronGroup], kept: dict[str, Tensor]) -> Cuts:
    """The positions that stay in every dimension that loses any."""
    alive: dict[tuple[str, str], Tensor] = {}
    for group in groups:
        if group.name not in kept or len(kept[group.name]) == group.size:
            continue
        stays = torch.zeros(group.size, dtype=torch.bool)
        stays[kept[group.name]] = True
        for where, neuron in group.maps.items():
            mask = (neuron < 0) | stays[neuron.clamp(min=0)]
            alive[where] = alive.get(where, True) & mask
    return {where: mask.nonzero().flatten() for where, mask in alive.items() if not mask.all()}


def positions_read(cuts: Cuts) -> dict[str, Tensor]:
    """Consumer → the positions that stay of what it reads."""
    return {layer: kept for (layer, side), kept in cuts.items() if side == "in"}


def plan(model: nn.Module, cuts: Cuts, stand_ins: dict[str, StandIn], mode: str = "rebuild") -> list[ParameterChange]:
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
                changes.append(_change(ParameterChange(name, tensor, old, source, dims, beside, mode)))
    return changes


def _change(raw: ParameterChange) -> ParameterChange:
    """The change whose ``new`` is still of full size, carried out."""
    old, new = raw.old, raw.follow(raw.new)
    if old is not None and not isinstance(old, nn.Parameter):
        return replace(raw, new=new)
    parameter = nn.Parameter(new, requires_grad=(raw.beside if old is None else old).requires_grad)
    if old is not None:
        if old.grad is not None:
            parameter.grad = raw.follow(old.grad)
        parameter.__dict__.update(old.__dict__)  # the user's marks, such as weight.no_decay
        parameter._backward_hooks = old._backward_hooks
        parameter._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    return replace(raw, new=parameter)


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


def zeroed_tensor(tensor: Tensor, kept: dict[int, Tensor]) -> Tensor:
    """A new tensor of the same shape, zero outside the kept indices of each dimension."""
    new = tensor.detach().clone()
    for dim, index in kept.items():
        new.index_fill_(dim, complement(index, new.shape[dim]).to(new.device), 0)
    return new


MODES: dict[str, Callable[[Tensor, dict[int, Tensor]], Tensor]] = {"rebuild": cut_tensor, "mask": zeroed_tensor}


class _Hold:
    """A gradient hook that keeps masked entries where they are; their values, gradients and optimizer state are zero already."""

    def __init__(self, parameter: Tensor, kept: dict[int, Tensor]):
        self.removed = {
            dim: complement(index, parameter.shape[dim]).to(parameter.device) for dim, index in kept.items()
        }

    def __call__(self, gradient: Tensor) -> Tensor:
        for dim, index in self.removed.items():
            gradient = gradient.index_fill(dim, index, 0)  # not in place: a penalty may differentiate it once more
        return gradient


def execute(model: nn.Module, changes: Iterable[ParameterChange], cuts: Cuts) -> None:
    """Put the planned tensors in place; names, hooks, device, dtype and training mode stay."""
    masking = False
    for change in changes:
        setattr(model.get_submodule(change.layer), change.tensor, change.new)
        masking = masking or change.mode == "mask"
        if change.new._backward_hooks:
            for key in [key for key, hook in change.new._backward_hooks.items() if isinstance(hook, _Hold)]:
                del change.new._backward_hooks[key]
        if change.mode == "mask" and change.new.requires_grad and change.kept:
            change.new.register_hook(_Hold(change.new, change.kept))
    if not masking:
        for (layer, _), kept in cuts.items():
            module = model.get_submodule(layer)
            if kind_of(module) is ATTENTION:
                become_explicit(module)
            synchronise_sizes(module, len(kept))
        leave_nesting(model)


def is_masked(model: nn.Module) -> bool:
    """Whether a parameter is held at zero in part."""
    return any(isinstance(hook, _Hold) for p in model.parameters() for hook in (p._backward_hooks or {}).values())


def check_masked(model: nn.Module, cuts: Cuts) -> None:
    """Raise where a consumer reads, with weights that are not zero any more, positions that ``cuts`` would remove."""
    for layer, kept in positions_read(cuts).items():
        module = model.get_submodule(layer)
        for name, dim in kind_of(module).inputs.items():
            weight = getattr(module, name).detach()
            if bool(weight.index_select(dim, complement(kept, weight.shape[dim]).to(weight.device)).any()):
                raise PruningError(
                    f"{layer}.{name} reads masked neurons again: an older state was loaded, or it was frozen at the event and "
                    'trained after. Mask them anew with prune(…, mode="mask") and the same budget, then rebuild()'
                )
