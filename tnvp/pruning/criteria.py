"""Scores per neuron from recorded moments and weights: the higher, the more the neuron is needed.

Shapes: N neurons of the group, P positions of a layer's dimension, K layers of the group, L locations of a feature,
U = P/L. Scores are pure functions of the evidence (`evidence`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import PruningError
from .evidence import Evidence, Side
from .obs import Reader, removal_scores

CONSTANT = 1e-12  # a variance under this share of the squared mean is the rounding of a constant


def variance(evidence: Evidence) -> Tensor:
    """Variance of the activation, what the consumers read (Berisha et al. 2025, arXiv 2507.12988)."""
    sides = evidence.sampled(evidence.consumers, "moments", "activation", 2)
    return evidence.couple(sides, lambda side: side.moments.pool(side.neuron, evidence.size).variance)


def variance_preactivation(evidence: Evidence) -> Tensor:
    """Variance of the producer's own output (Weinstein and Belinkov 2021, OpenReview 7d_GchF1e7)."""
    sides = evidence.sampled(evidence.producers, "moments", "pre-activation", 2)
    return evidence.couple(sides, lambda side: side.moments.pool(side.neuron, evidence.size).variance)


def variance_out(evidence: Evidence) -> Tensor:
    """Variance times squared norm of the outgoing weights, position by position.

    This is the expected squared change of a consumer's output when the neuron is replaced by its mean; its root is the
    fluctuation of FLAP (An et al., AAAI 2024).
    """

    def score(side: Side) -> Tensor:
        spread = side.moments.variance
        return side.sum_by_neuron(spread * side.weight.flatten(1).to(spread).square().sum(1), evidence.size)

    return evidence.couple(evidence.sampled(evidence.consumers, "moments", "activation", 2), score)


def obs(evidence: Evidence) -> Tensor:
    """Greedy optimal brain surgeon: what a neuron's removal costs when the others take over (see the module `obs`).

    C is the covariance of what a consumer reads (OBC, Frantar and Alistarh 2022; ZipLM, Kurtic et al. 2023), for a
    convolution that of pixels' channels. Costs of consumers add up whatever ``coupled`` is: they are one loss.
    """
    sides = evidence.sampled(evidence.consumers, "moments", "activation", 2)
    return removal_scores([_reader(side, evidence.size) for side in sides], evidence.size).cpu()


def _reader(side: Side, size: int) -> Reader:
    if side.covariance is None:
        raise PruningError(
            f"{side.layer!r} reads {len(side.neuron)} features, too many for the covariance that the criterion 'obs' needs: "
            "put the layers that write them into ignore=[…], or take another criterion"
        )
    covariance, locations = side.covariance
    device = "cpu" if covariance.device.type == "mps" else covariance.device  # MPS has no float64
    covariance = covariance.to(device).double()
    features = side.weight.flatten(1).to(device).double().unflatten(0, (-1, locations)).flatten(1)  # [U, L·O]
    mean = side.moments.mean.to(covariance).square().unflatten(0, (-1, locations)).mean(1)
    constant = covariance.diagonal() <= CONSTANT * mean  # the bias takes it over: it costs nothing
    features = torch.where(constant[:, None], 0, features)
    try:
        return Reader(covariance, features, side.neuron[::locations].to(device), size)
    except torch.linalg.LinAlgError as error:
        raise PruningError(f"the covariance recorded at {side.layer!r} can't be inverted: {error}") from error


def taylor(evidence: Evidence) -> Tensor:
    """|Σ activation·gradient| over all samples and positions: the first-order change of the loss without the neuron
    (Molchanov et al. 2017, who take the absolute value sample by sample).

    It is |dL/dg| for a gate g = 1 on the neuron, L the sum of the losses that were differentiated. A GradScaler's scale
    stays in it.
    """
    hint = "taylor needs record() around training with backward: `with pruner.record(): … loss.backward()`"
    sides = evidence.sampled(evidence.consumers, "taylor", "gradient", 1, hint)
    return evidence.couple(
        sides, lambda side: side.sum_by_neuron(side.taylor.mean * side.taylor.count, evidence.size).abs()
    )


def apoz(evidence: Evidence) -> Tensor:
    """Fraction of activations that are not zero: 1 − APoZ, the average percentage of zeros (Hu et al. 2016)."""
    sides = evidence.sampled(evidence.consumers, "nonzero", "activation", 1)
    return evidence.couple(sides, lambda side: side.nonzero.pool(side.neuron, evidence.size).mean)


def bn_scale(evidence: Evidence) -> Tensor:
    """|γ| of the batch norm that carries the neuron (network slimming, Liu et al. 2017)."""
    covered = sum((side.sum_by_neuron(torch.ones(len(side.neuron)), evidence.size) for side in evidence.norms), 0)
    if not evidence.norms or not bool((covered > 0).all()):
        raise PruningError(
            f"group {evidence.group!r} has neurons that go through no batch norm with a weight, which 'bn_scale' scores: "
            f"leave them alone, ignore={[side.layer for side in evidence.producers]}, or take another criterion"
        )
    return evidence.couple(evidence.norms, lambda side: side.sum_by_neuron(side.weight.float().abs(), evidence.size))


def l1(evidence: Evidence) -> Tensor:
    """Sum of the absolute incoming weights (Li et al., ICLR 2017)."""
    return evidence.couple(
        evidence.producers, lambda side: side.sum_by_neuron(side.weight.flatten(1).float().abs().sum(1), evidence.size)
    )


def l2(evidence: Evidence) -> Tensor:
    """Euclidean norm of the incoming weights (He et al., IJCAI 2018)."""

    def score(side: Side) -> Tensor:
        return side.sum_by_neuron(side.weight.flatten(1).float().square().sum(1), evidence.size).sqrt()

    return evidence.couple(evidence.producers, score)


def random(evidence: Evidence) -> Tensor:
    """Uniform scores from the pruner's seed: the baseline that any criterion must beat."""
    return torch.rand(evidence.size, generator=evidence.generator)


@dataclass(frozen=True)
class Criterion:
    """A score, the signal it needs recorded, whether its root is on the scale of a standard deviation, and whether it asks
    what the network is now: then a calibration pass, where there is one, is its evidence."""

    score: Callable[[Evidence], Tensor]
    signal: str | None = None
    is_variance: bool = False
    asks_now: bool = False


CRITERIA: dict[str, Criterion] = {
    "variance": Criterion(variance, "activation", is_variance=True),
    "variance_preactivation": Criterion(variance_preactivation, "preactivation", is_variance=True),
    "variance_out": Criterion(variance_out, "activation", is_variance=True),
    "obs": Criterion(obs, "covariance", is_variance=True, asks_now=True),
    "taylor": Criterion(taylor, "taylor"),
    "apoz": Criterion(apoz, "nonzero"),
    "bn_scale": Criterion(bn_scale),
    "l1": Criterion(l1),
    "l2": Criterion(l2),
    "random": Criterion(random),
}
