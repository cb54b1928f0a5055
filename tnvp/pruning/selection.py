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

    def next_width(self, width: int) -> int | None:
        """The next narrower width allowed: a multiple of ``round_to``, at least ``min_neurons``; None at the narrowest."""
        narrower = (width - 1) // self.round_to * self.round_to
        return narrower if narrower >= self.min_neurons else None


def top(score: Tensor, width: int) -> Tensor:
    """Indices of the ``width`` highest scores, in ascending order of index; ties go to the lower index."""
    order = torch.sort(score.detach().cpu(), descending=True, stable=True).indices
    return order[:width].sort().values


def keep_by_sparsity(scores: Scores, original: dict[str, int], sparsity: float, limits: Limits) -> Kept:
    """Keep so that a fraction ``sparsity`` of the original neurons is gone, or as much less as the limits ask for."""
    if limits.scope == "global":
        total = sum(original.values())
        return _keep(scores, total - _rounded(sparsity * total), limits)
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
