"""Scores and a budget → the indices of the neurons to keep.

Every function takes ``scores`` (group → score [N] of the neurons alive) and ``original`` (group → neurons at birth): a budget
is of the original network, so that asking twice for the same removes nothing the second time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import PruningError

SCOPES = ("layer", "global")
Scores = dict[str, Tensor]
Kept = dict[str, Tensor]


@dataclass(frozen=True)
class Limits:
    """Where neurons compete ("layer" or "global"), the narrowest width allowed, and the multiple that widths keep to."""

    scope: str = "layer"
    min_neurons: int = 1
    round_to: int = 1

    def __post_init__(self):
        if self.scope not in SCOPES:
            raise PruningError(f"unknown scope {self.scope!r}: choose one of {', '.join(SCOPES)}")
        for name in ("min_neurons", "round_to"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PruningError(f"{name} must be an integer of at least 1, got {value!r}")

    def width(self, wanted: int, alive: int) -> int:
        """The width nearest above ``wanted`` that the limits allow for a group with ``alive`` neurons."""
        wanted = max(wanted, self.min_neurons)
        return min(alive, math.ceil(wanted / self.round_to) * self.round_to)


def top(score: Tensor, width: int) -> Tensor:
    """Indices of the ``width`` highest scores, in ascending order of index; ties go to the lower index."""
    order = torch.sort(score.detach().cpu(), descending=True, stable=True).indices
    return order[:width].sort().values


def keep_by_sparsity(scores: Scores, original: dict[str, int], sparsity: float, limits: Limits) -> Kept:
    """Keep so that a fraction ``sparsity`` of the original neurons is gone, as far as the limits allow."""
    if limits.scope == "layer":
        widths = {name: original[name] - math.floor(sparsity * original[name] + 0.5) for name in scores}
    else:
        total = sum(original.values())
        widths = _global_widths(scores, total - math.floor(sparsity * total + 0.5), limits)
    return {name: top(score, limits.width(widths[name], len(score))) for name, score in scores.items()}


def _global_widths(scores: Scores, budget: int, limits: Limits) -> dict[str, int]:
    """Widths when the ``budget`` strongest neurons survive, the ``min_neurons`` strongest of each group before all."""
    ranked, owner = [], []
    for number, score in enumerate(scores.values()):
        ranked.append(torch.sort(score.detach().cpu().double(), descending=True, stable=True).values)
        ranked[-1][: limits.min_neurons] = math.inf
        owner.append(torch.full((len(score),), number))
    order = torch.sort(torch.cat(ranked), descending=True, stable=True).indices[: max(budget, 0)]
    counts = torch.bincount(torch.cat(owner)[order], minlength=len(scores)).tolist()
    return dict(zip(scores, counts, strict=True))


def keep_by_threshold(scores: Scores, threshold: float, limits: Limits) -> Kept:
    """Keep the neurons whose score reaches ``threshold`` times their layer's mean score (the demo's rule, on stds)."""
    kept = {}
    for name, score in scores.items():
        strong = int((score >= threshold * score.mean()).sum())
        kept[name] = top(score, limits.width(strong, len(score)))
    return kept


def keep_by_reduction(
    scores: Scores, original: dict[str, int], target: float, limits: Limits, reduction: Callable[[Kept], float]
) -> Kept:
    """Remove the fewest neurons for which ``reduction`` (a fraction, of parameters or FLOPs) reaches ``target``.

    Bisects over the number of neurons removed; where even the narrowest network falls short, that one is returned.
    """
    total = sum(original.values())
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if reduction(keep_by_sparsity(scores, original, middle / total, limits)) >= target:
            high = middle
        else:
            low = middle + 1
    return keep_by_sparsity(scores, original, low / total, limits)
