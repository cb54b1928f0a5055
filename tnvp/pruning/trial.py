"""Proof before use: every group is cut in a copy of the network, which must run and equal the masked original.

The walk over the graph reasons about what it understands; the trial holds for everything else: code that depends on a
width, a reader that a hand-made group forgot, a layer that reads in training only. It is held twice: with random cuts when
groups are found, and with the cut that an event is about to make.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .attention import become_explicit, leave_nesting
from .calibration import tensors_in
from .channels import NeuronGroup, copy_of
from .compensation import StandIn, replacing, uniform_stand_ins
from .floors import with_floors
from .layers import absorbs_constants
from .selection import Kept, Limits, top
from .surgery import Cuts, cuts_for, execute, plan, positions_read

Tolerance = dict[torch.dtype, float]
DIFFERS = "the network computes something else without it: its code may depend on the width"
NAN = "the network gives NaN on the inputs, so that no trial can tell whether it can be cut"
RANDOM = "the network is random in eval mode, so that no trial can tell whether it can be cut"
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of the largest output; other types count as float32
IN_TRAINING = {torch.float64: 1e-3, torch.float32: 5e-2}  # batch norms enlarge rounding where a batch hardly varies
FAINT = (
    1e-2  # a parameter with no larger entry, such as a head that starts at zero, would hide all that happens before it
)


def failing(
    model: nn.Module, groups: Sequence[NeuronGroup], inputs: tuple, kept: Kept | None = None
) -> list[tuple[NeuronGroup, str]]:
    """The groups that can't be cut, each with what happened when all but ``kept`` went in a copy of the network.

    Without ``kept`` a random part goes. Behind a mixer nothing can be equal: such groups need only leave a network that runs.
    """
    groups = [group for group in groups if group.size > 1]
    parts = _random_parts(groups) if kept is None else kept
    exact = [group for group in groups if not group.mixers]
    mixed = [group for group in groups if group.mixers]
    return _failing(model, exact, inputs, parts) + _failing(model, mixed, inputs, parts)


def _failing(model, groups: Sequence[NeuronGroup], inputs: tuple, parts: Kept) -> list[tuple[NeuronGroup, str]]:
    if not groups or not (trouble := _trouble(model, groups, inputs, parts)):
        return []
    if len(groups) == 1:
        return [(groups[0], trouble)]
    middle = len(groups) // 2
    found = _failing(model, groups[:middle], inputs, parts) + _failing(model, groups[middle:], inputs, parts)
    return found or _failing_together(model, list(groups), inputs, parts)


def _failing_together(model, groups: list[NeuronGroup], inputs: tuple, parts: Kept) -> list[tuple[NeuronGroup, str]]:
    """Groups that fail with each other only: the fewest that do, and what fails among the others."""
    together = list(groups)
    for group in groups:
        rest = [other for other in together if other is not group]
        if _trouble(model, rest, inputs, parts):
            together = rest
    why = f"fails together with other groups: {_trouble(model, together, inputs, parts)}"
    others = [group for group in groups if not any(group is other for other in together)]
    return [(group, why) for group in together] + _failing(model, others, inputs, parts)


def _trouble(model: nn.Module, groups: Sequence[NeuronGroup], inputs: tuple, parts: Kept) -> str:
    """What goes wrong when all but ``parts`` of ``groups`` is cut; "" if nothing does."""
    cuts = cuts_for(groups, {group.name: parts[group.name] for group in groups})
    exact = not any(group.mixers for group in groups)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        full, inputs, stand_ins = _masked(model, cuts, inputs)
        pruned = copy_of(full)
        try:
            execute(pruned, plan(pruned, cuts, stand_ins), cuts)
        except Exception as error:
            return f"it can't be cut: {_first_line(error)}"
        with replacing(full, stand_ins):
            trouble = _difference(full.eval(), pruned.eval(), inputs, exact, TOLERANCE)
            return trouble or _in_training(full, pruned, inputs, exact)


def _difference(full: nn.Module, pruned: nn.Module, inputs: tuple, exact: bool, tolerance: Tolerance) -> str:
    expected = _run(full, inputs)
    try:
        found = _run(pruned, inputs)
    except Exception as error:
        return f"the network fails without it: {_first_line(error)}"
    if any(bool(leaf.isnan().any()) for leaf in tensors_in(expected) if leaf.is_floating_point()):
        return NAN
    if exact and not _equal(found, expected, tolerance):
        return DIFFERS if _equal(_run(full, inputs, seed=1), expected, tolerance) else RANDOM
    return ""


def _in_training(full: nn.Module, pruned: nn.Module, inputs: tuple, exact: bool) -> str:
    """The same in training mode; a network that does not run so, or is random there, tells nothing."""
    try:
        trouble = _difference(full.train(), pruned.train(), inputs, exact, IN_TRAINING)
    except Exception:
        return ""
    return f"{trouble} (in training mode)" if trouble and trouble not in (RANDOM, NAN) else ""


def _run(model: nn.Module, inputs: tuple, seed: int = 0):
    torch.manual_seed(seed)
    return model(*inputs)


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


def _masked(model: nn.Module, cuts: Cuts, inputs: tuple) -> tuple[nn.Module, tuple, dict[str, StandIn]]:
    """A copy of the network that hides nothing, in float64 where it runs so, its inputs, and what stands in for the cuts."""
    full = _plain(copy_of(model))
    try:
        wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
        full.double().eval()(*wide)
    except (RuntimeError, TypeError):
        full, wide = _plain(copy_of(model)), inputs
    return full, wide, _stand_ins(full, cuts)


def _plain(model: nn.Module) -> nn.Module:
    """Attention spelled out, no dropout, and nothing so faint that it hides what comes before it."""
    for module in model.modules():
        become_explicit(module)
        for chance in ("p", "dropout"):
            if isinstance(getattr(module, chance, None), float):
                setattr(module, chance, 0.0)
    leave_nesting(model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and parameter.abs().max() < FAINT:
            parameter.normal_(std=0.3 if parameter.dim() < 2 else max(1, parameter[0].numel()) ** -0.5)
    return model


def _stand_ins(model: nn.Module, cuts: Cuts) -> dict[str, StandIn]:
    """Consumer → 0.5 for what it loses, where its bias takes that exactly; 0 elsewhere."""
    return uniform_stand_ins(model, positions_read(cuts), lambda module: 0.5 if absorbs_constants(module) else 0.0)


def _equal(found, expected, tolerance: Tolerance) -> bool:
    ours, theirs = tensors_in(found), tensors_in(expected)
    return len(ours) == len(theirs) and all(_close(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _close(found: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    share = tolerance.get(expected.dtype, tolerance[torch.float32])
    return torch.allclose(found, expected, rtol=share, atol=share * scale)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
