"""Proof before use: every group is cut in a copy of the network, which must run and equal the masked original.

The walk over the graph reasons about what it understands; the trial holds for everything else: code that depends on a
width, a reader that a hand-made group forgot, a layer that reads in training only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .attention import become_explicit, leave_nesting
from .calibration import tensors_in
from .channels import NeuronGroup, copy_of, evaluating
from .compensation import StandIn, constant_stand_in, replacing
from .floors import with_floors
from .layers import absorbs_constants, width
from .selection import Limits, top
from .surgery import Cuts, cuts_for, execute, plan

DIFFERS = "the network computes something else without it: its code may depend on the width"
RANDOM = "the network is random in eval mode, so that no trial can tell whether it can be cut"
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of the largest output; other types count as float32


def failing(model: nn.Module, groups: Sequence[NeuronGroup], inputs: tuple) -> list[tuple[NeuronGroup, str]]:
    """The groups that can't be cut, each with what happened when part of its neurons went in a copy of the network.

    Behind a mixer nothing can be equal: such groups need only leave a network that runs.
    """
    groups = [group for group in groups if group.size > 1]
    exact = [group for group in groups if not group.mixers]
    mixed = [group for group in groups if group.mixers]
    return _failing(model, exact, inputs) + _failing(model, mixed, inputs)


def _failing(model: nn.Module, groups: Sequence[NeuronGroup], inputs: tuple) -> list[tuple[NeuronGroup, str]]:
    if not groups or not (trouble := _trouble(model, groups, inputs)):
        return []
    if len(groups) == 1:
        return [(groups[0], trouble)]
    middle = len(groups) // 2
    found = _failing(model, groups[:middle], inputs) + _failing(model, groups[middle:], inputs)
    return found or [(group, f"fails together with other groups: {trouble}") for group in groups]


def _trouble(model: nn.Module, groups: Sequence[NeuronGroup], inputs: tuple) -> str:
    """What goes wrong when a random part of all ``groups`` is cut; "" if nothing does."""
    cuts = cuts_for(groups, _random_parts(groups))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        full, inputs, stand_ins, expected = _masked(model, cuts, inputs)
        pruned = copy_of(full)
        try:
            execute(pruned, plan(pruned, cuts, stand_ins), cuts)
            with evaluating(pruned):
                found = pruned(*inputs)
        except Exception as error:
            return f"the network fails without it: {_first_line(error)}"
        if not any(group.mixers for group in groups) and not _equal(found, expected):
            with evaluating(full), replacing(full, stand_ins):
                return DIFFERS if _equal(full(*inputs), expected) else RANDOM
        if not _runs_in_training(pruned, inputs) and _runs_in_training(full, inputs):
            return "the network fails without it in training mode"
    return ""


def _random_parts(groups: Sequence[NeuronGroup]) -> dict[str, Tensor]:
    """A different share of each group's neurons, without pattern: code that counts on equal or regular cuts shows."""
    generator = torch.Generator().manual_seed(0)
    ranks, parts = {}, {}
    for group in groups:
        share = 0.3 + 0.5 * float(torch.rand((), generator=generator))
        ranks[group.name] = torch.randperm(group.size, generator=generator)
        parts[group.name] = top(ranks[group.name], max(1, int(share * group.size)))
    everyone = {group.name: torch.arange(group.size) for group in groups}
    return with_floors(groups, parts, everyone, ranks, Limits())


def _masked(model: nn.Module, cuts: Cuts, inputs: tuple) -> tuple[nn.Module, tuple, dict[str, StandIn], object]:
    """A copy of the network, in float64 where it runs so, its inputs, what stands in for the cuts, and its output then."""
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    try:
        full = _explicit(copy_of(model).double())
        stand_ins = _stand_ins(full, cuts)
        with evaluating(full), replacing(full, stand_ins):
            return full, wide, stand_ins, full(*wide)
    except (RuntimeError, TypeError):
        full = _explicit(copy_of(model))
        stand_ins = _stand_ins(full, cuts)
        with evaluating(full), replacing(full, stand_ins):
            return full, inputs, stand_ins, full(*inputs)


def _explicit(model: nn.Module) -> nn.Module:
    for module in model.modules():
        become_explicit(module)
    leave_nesting(model)
    return model


def _stand_ins(model: nn.Module, cuts: Cuts) -> dict[str, StandIn]:
    """Consumer → 0.5 for what it loses, where its bias takes that exactly; 0 elsewhere."""
    stand_ins = {}
    for (layer, side), kept in cuts.items():
        if side == "in":
            module = model.get_submodule(layer)
            value = 0.5 if absorbs_constants(module) else 0.0
            stand_ins[layer] = constant_stand_in(torch.full((width(module, "in"),), value), kept)
    return stand_ins


def _runs_in_training(model: nn.Module, inputs: tuple) -> bool:
    try:
        model.train()(*inputs)
    except Exception:
        return False
    return True


def _equal(found, expected) -> bool:
    ours, theirs = tensors_in(found), tensors_in(expected)
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    tolerance = TOLERANCE.get(expected.dtype, TOLERANCE[torch.float32])
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
