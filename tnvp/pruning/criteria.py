"""Scores per neuron from recorded moments and weights: the higher, the more the neuron is needed.

Shapes: N neurons of the group, P positions of a layer's dimension. Scores are pure functions of the evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import PruningError
from .moments import Moments


@dataclass(frozen=True)
class Side:
    """One layer seen from the group: its weight, the neuron [P] at each position, and what was recorded there."""

    weight: Tensor  # moved so that dimension 0 is the group's: [P, …]
    neuron: Tensor  # [P], −1 where the position belongs to another group
    moments: Moments | None


@dataclass(frozen=True)
class Evidence:
    """What a criterion may look at for one group of ``size`` neurons."""

    group: str
    size: int
    producers: list[Side]
    consumers: list[Side]
    activation: Moments | None
    preactivation: Moments | None
    generator: torch.Generator

    def sum_by_neuron(self, side: Side, values: Tensor) -> Tensor:
        """Add the values [P] of a layer's positions up to the neurons [N] that own them."""
        neuron = side.neuron.to(values.device)
        mine = neuron >= 0
        return values.new_zeros(self.size).index_add(0, neuron[mine], values[mine])


def _variance(moments: Moments | None, group: str, signal: str) -> Tensor:
    count = moments.count if moments is not None else 0
    if count < 2:
        raise PruningError(
            f"group {group!r}: {count} samples of its {signal} were recorded and a variance needs at least 2: "
            "run your loop inside `with pruner.record():`, or pass prune(calibration=…)"
        )
    return moments.variance


def variance(evidence: Evidence) -> Tensor:
    """Variance of the activation, what the consumers read (Berisha et al. 2025, arXiv 2507.12988)."""
    return _variance(evidence.activation, evidence.group, "activation")


def variance_preactivation(evidence: Evidence) -> Tensor:
    """Variance of the producer's own output (Weinstein and Belinkov 2021, OpenReview 7d_GchF1e7)."""
    return _variance(evidence.preactivation, evidence.group, "pre-activation")


def variance_out(evidence: Evidence) -> Tensor:
    """Variance times squared norm of the outgoing weights, position by position.

    This is the expected squared change of the consumers' output when the neuron is replaced by its mean; its root is the
    fluctuation of FLAP (An et al., AAAI 2024).
    """
    score = 0
    for side in evidence.consumers:
        spread = _variance(side.moments, evidence.group, "activation")
        outgoing = side.weight.flatten(1).to(spread).square().sum(1)
        score = score + evidence.sum_by_neuron(side, spread * outgoing)
    return score


def l1(evidence: Evidence) -> Tensor:
    """Sum of the absolute incoming weights (Li et al., ICLR 2017)."""
    return sum(evidence.sum_by_neuron(s, s.weight.flatten(1).float().abs().sum(1)) for s in evidence.producers)


def l2(evidence: Evidence) -> Tensor:
    """Euclidean norm of the incoming weights (He et al., IJCAI 2018)."""
    squares = (evidence.sum_by_neuron(s, s.weight.flatten(1).float().square().sum(1)) for s in evidence.producers)
    return sum(squares).sqrt()


def random(evidence: Evidence) -> Tensor:
    """Uniform scores from the pruner's seed: the baseline that any criterion must beat."""
    return torch.rand(evidence.size, generator=evidence.generator)


@dataclass(frozen=True)
class Criterion:
    """A score, the signal it needs recorded, and whether its root is on the scale of a standard deviation."""

    score: Callable[[Evidence], Tensor]
    signal: str | None = None
    is_variance: bool = False


CRITERIA: dict[str, Criterion] = {
    "variance": Criterion(variance, "activation", is_variance=True),
    "variance_preactivation": Criterion(variance_preactivation, "preactivation", is_variance=True),
    "variance_out": Criterion(variance_out, "activation", is_variance=True),
    "l1": Criterion(l1),
    "l2": Criterion(l2),
    "random": Criterion(random),
}
