"""Scores and a budget → the indices of the neurons to keep.

Every function takes ``scores`` (group → score [N] of the neurons alive) and ``original`` (group → neurons at birth): a budget
is of the original network, so that asking twice for the same removes nothing the second time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from .errors import PruningError, choose

SCOPES = ("layer", "global")
NORMALIZATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # name → what a group's scores [N] are divided by
    "none": torch.ones_like,
    "mean": torch.mean,
    "max": torch.amax,
    "l2": torch.linalg.vector_norm,  # Molchanov et al. 2017
}
Scores = dict[str, Tensor]
Kept = dict[str, Tensor]


@dataclass(frozen=True)
class Limits:
    """Where neurons compete ("layer" or "global"), the narrowest width allowed, the multiple that widths keep to, and by
    what a group's scores are divided before they compete globally."""

    scope: str = "layer"
    min_neurons: int = 1
    round_to: int = 1
    normalize: str = "none"

    def __post_init__(self):
        choose("scope", self.scope, SCOPES)
        choose("normalize", self.normalize, NORMALIZATIONS)
        for name in ("min_neurons", "round_to"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PruningError(f"{name} must be an integer of at least 1, got {value!r}")

    def next_width(self, width: int) -> int | None:
        """The next narrower width allowed: a multiple of ``round_to``, at least ``min_neurons``; None at the narrowest."""
        narrower = (width - 1) // self.round_to * self.round_to
        return narrower if narrower >= self.min_neurons else None


def normalized(scores: Scores, how: str) -> Scores:
    """Each group's scores divided by their own mean, maximum or norm; those of a group that is all 0 stay 0."""
    wide = {name: score.detach().cpu().double() for name, score in scores.items()}
    scales = {name: NORMALIZATIONS[how](score) for name, score in wide.items()}
    return {name: score / torch.where(scales[name] == 0, 1, scales[name]) for name, score in wide.items()}


def top(score: Tensor, width: int) -> Tensor:
    """Indices of the ``width`` highest scores, in ascending order of index; ties go to the lower index."""
    order = torch.sort(score.detach().cpu(), descending=True, stable=True).indices
    return order[:width].sort().values


def keep_by_sparsity(scores: Scores, original: dict[str, int], sparsity: float, limits: Limits) -> Kept:
    """Keep so that a fraction ``sparsity`` of the original neurons is gone, or as much less as the limits ask for."""
    if limits.scope == "global":
        total = sum(original.values())
        return _keep(normalized(scores, limits.normalize), total - _rounded(sparsity * total), limits)
    return {
        name: _keep({name: score}, original[name] - _rounded(sparsity * original[name]), limits)[name]
        for name, score in scores.items()
    }


def keep_by_threshold(scores: Scores, threshold: float, limits: Limits) -> Kept:
    """Keep the neurons whose score reaches ``threshold`` times their layer's mean score (the demo's rule, on stds)."""
    kept = {}
    for name, score in scores.items():
        bar = threshold * float(score.double().mean()) * (1 - 1e-9)  # equal scores are not under their own mean
        kept[name] = _keep({name: score}, int((score >= bar).sum()), limits)[name]
    return kept


def _rounded(count: float) -> int:
    return math.floor(count + 0.5)


def _keep(scores: Scores, budget: int, limits: Limits) -> Kept:
    """Keep at least ``budget`` neurons in all groups together, removing the weakest blocks that still fit.

    A block is what takes a group to its next allowed width: one neuron, or with ``round_to`` several, which compete by
    their mean score. Only blocks that leave the budget whole go, so that a second call finds none, whatever the scores.
    """
    ranked = {
        name: torch.sort(score.detach().cpu().double(), stable=True).values.tolist() for name, score in scores.items()
    }
    widths = {name: len(score) for name, score in scores.items()}
    spare = sum(widths.values()) - budget
    blocks: list[tuple[float, int, str, int]] = []  # ties: the later group gives first, as the later neuron does

    def offer(order: int, name: str) -> None:
        narrower = limits.next_width(widths[name])
        if narrower is not None:
            gone = len(ranked[name]) - widths[name]
            size = widths[name] - narrower
            heapq.heappush(blocks, (sum(ranked[name][gone : gone + size]) / size, order, name, size))

    for order, name in enumerate(scores):
        offer(-order, name)
    while blocks and spare > 0:
        _, order, name, size = heapq.heappop(blocks)
        if size <= spare:
            widths[name] -= size
            spare -= size
            offer(order, name)
    return {name: top(score, widths[name]) for name, score in scores.items()}


def keep_by_reduction(
    scores: Scores, original: dict[str, int], target: float, limits: Limits, reduction: Callable[[Kept], float]
) -> Kept:
    """Remove the fewest neurons for which ``reduction`` (a fraction, of parameters or FLOPs) reaches ``target``.

    Bisects over the number of neurons removed, then over the groups that the last of these steps narrows all at once.
    Where even the narrowest network falls short, that one is returned.
    """
    total = sum(original.values())

    def keep(removed: int) -> Kept:
        return keep_by_sparsity(scores, original, removed / total, limits)

    removed = _first(total, lambda count: reduction(keep(count)) >= target)
    if removed == 0:
        return keep(0)
    wide, narrow = keep(removed - 1), keep(removed)
    order = sorted(
        (name for name in reversed(narrow) if len(narrow[name]) < len(wide[name])),  # ties: the later group first
        key=lambda name: _relative_score(scores[name], wide[name], narrow[name]),
    )

    def partly(count: int) -> Kept:
        return narrow | {name: wide[name] for name in order[count:]}

    return partly(_first(len(order), lambda count: reduction(partly(count)) >= target))


def _first(end: int, holds: Callable[[int], bool]) -> int:
    """The first of 0, 1, … for which ``holds``, by bisection; ``end`` where none before it does."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _relative_score(score: Tensor, wide: Tensor, narrow: Tensor) -> float:
    """Mean score of the neurons that ``wide`` keeps and ``narrow`` doesn't, as a share of the group's mean."""
    values, gone = score.double(), len(wide) - len(narrow)
    return float((values[wide].sum() - values[narrow].sum()) / gone / values.mean().clamp(min=1e-300))


def one_budget(**budgets: float | None) -> dict[str, float]:
    """The one budget that was given, checked."""
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise PruningError(f"prune() takes exactly one of {', '.join(budgets)}; got {', '.join(given) or 'none'}")
    ((name, value),) = given.items()
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise PruningError(f"{name} must be a finite number, got {value!r}")
    if name == "threshold" and value < 0:
        raise PruningError(f"threshold must be at least 0, got {value}")
    if name != "threshold" and not 0 <= value < 1:
        raise PruningError(
            f"{name} is a fraction in [0, 1), got {value}"
            + (": did you mean " + f"{value / 100:g}?" if 1 < value < 100 else "")
        )
    return {name: float(value)}
