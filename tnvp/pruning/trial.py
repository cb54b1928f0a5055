"""Proof before use: every group is cut in a copy of the network, which must run and equal the masked original.

The walk over the graph reasons about what it understands; the trial holds for everything else: code that depends on a
width, a reader that a hand-made group forgot, a layer that reads in training only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .calibration import tensors_in
from .channels import NeuronGroup, copy_of, evaluating
from .compensation import replacing
from .surgery import Cuts, complement, cuts_for, execute, plan

DIFFERS = "the network computes something else without it: its code may depend on the width"
RANDOM = "the network is random in eval mode, so that no trial can tell whether it can be cut"
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of the largest output; other types count as float32


def failing(model: nn.Module, groups: Sequence[NeuronGroup], inputs: tuple) -> list[tuple[NeuronGroup, str]]:
    """The groups that can't be cut, each with what happened when half its neurons went in a copy of the network."""
    groups = [group for group in groups if group.size > 1]
    if not groups or not (trouble := _trouble(model, groups, inputs)):
        return []
    if len(groups) == 1:
        return [(groups[0], trouble)]
    middle = len(groups) // 2
    found = failing(model, groups[:middle], inputs) + failing(model, groups[middle:], inputs)
    return found or [(group, f"fails together with other groups: {trouble}") for group in groups]


def _trouble(model: nn.Module, groups: Sequence[NeuronGroup], inputs: tuple) -> str:
    """What goes wrong when every second neuron of all ``groups`` is cut; "" if nothing does."""
    cuts = cuts_for(groups, {group.name: torch.arange(0, group.size, 2) for group in groups})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        full, inputs = _in_double(model, inputs)
        pruned, constants = copy_of(full), _constants(full, cuts)
        try:
            execute(pruned, plan(pruned, cuts, constants), cuts)
            with evaluating(pruned):
                found = pruned(*inputs)
        except Exception as error:
            return f"the network fails without it: {_first_line(error)}"
        with evaluating(full), replacing(full, _replaced(cuts, constants)):
            expected = full(*inputs)
            if not _equal(found, expected):
                return DIFFERS if _equal(full(*inputs), expected) else RANDOM
        if _runs_in_training(full, inputs) and not _runs_in_training(pruned, inputs):
            return "the network fails without it in training mode"
    return ""


def _in_double(model: nn.Module, inputs: tuple) -> tuple[nn.Module, tuple]:
    """A copy of the network in float64 where it runs so, and its inputs."""
    try:
        double = copy_of(model).double()
        wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
        with evaluating(double):
            double(*wide)
    except (RuntimeError, TypeError):
        return copy_of(model), inputs
    return double, wide


def _constants(model: nn.Module, cuts: Cuts) -> dict[str, Tensor]:
    """Consumer → the constant [P] it reads: 0.5 for Linear, whose bias takes it exactly; 0 for a convolution, padded or not."""
    read = {layer: model.get_submodule(layer) for layer, side in cuts if side == "in"}
    return {n: torch.full((m.weight.shape[1],), 0.5 if isinstance(m, nn.Linear) else 0.0) for n, m in read.items()}


def _replaced(cuts: Cuts, constants: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Consumer → its removed positions and the constants that stand there."""
    removed = {layer: complement(cuts[layer, "in"], len(constant)) for layer, constant in constants.items()}
    return {layer: (gone, constants[layer][gone]) for layer, gone in removed.items()}


def _runs_in_training(model: nn.Module, inputs: tuple) -> bool:
    try:
        copy_of(model).train()(*inputs)
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
