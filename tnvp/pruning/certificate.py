"""The certificate of a prune event: the change of the network's output that was predicted, and the one that was measured.

The prediction is the masked network: full size, each consumer reading what stands in for removed neurons. The measurement is the
rebuilt one. All numbers are relative to the norm of the output before the event, over the calibration batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .calibration import relative_error
from .channels import NeuronGroup
from .layers import absorbs_constants

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # deep networks round; other types: 0.1


@dataclass(frozen=True)
class Certificate:
    """Relative changes of the network's output. ``predicted``² = ``mean_part``² + ``remainder``²; ``measured`` adds ``border_part``."""

    predicted: float  # masked against before
    measured: float  # rebuilt against before
    mean_part: float  # of the prediction: the same shift for every sample
    remainder: float  # of the prediction: what varies from sample to sample
    border_part: float  # rebuilt against masked: zero padding, strides of transposed convolutions, mixers
    disagreement: str = ""  # in words, where the border part is larger than it should be


def certify(
    before: list[Tensor],
    masked: list[Tensor],
    after: list[Tensor],
    batches: int,
    excuses: list[str],
    dtype: torch.dtype,
) -> Certificate:
    """Compare outputs, each a list of ``batches`` × leaves tensors [B, …]; ``excuses``: layers that can't absorb a constant."""
    predicted, measured = relative_error(before, masked), relative_error(before, after)
    border = relative_error(masked, after) * math.sqrt(_square(masked) / max(_square(before), 1e-300))
    mean = math.sqrt(_mean_square(before, masked, batches) / max(_square(before), 1e-300))
    remainder = math.sqrt(max(predicted**2 - mean**2, 0.0))
    tolerance = TOLERANCE.get(dtype, 0.1)
    disagreement = ""
    if not border <= (max(tolerance, predicted) if excuses else tolerance):
        cause = (
            f"{', '.join(excuses)} can't take a constant into the bias exactly (zero padding, strides, or a mixer): "
            'compare compensation="none" or "affine"'
            if excuses
            else "nothing in the network explains it: please report it with the network"
        )
        disagreement = (
            f"the pruned network's output changed by {measured:.2%}, the masked one's by {predicted:.2%}, and they differ by "
            f"{border:.2%}; {cause}"
        )
    return Certificate(predicted, measured, mean, remainder, border, disagreement)


def excuses(model: nn.Module, groups: Iterable[NeuronGroup]) -> list[str]:
    """Layers of the groups behind which masked and rebuilt may differ."""
    groups = list(groups)
    consumers = dict.fromkeys(name for group in groups for name in group.consumers)
    mixers = [name for group in groups for name in group.mixers]
    return [name for name in consumers if not absorbs_constants(model.get_submodule(name))] + mixers


def warn_of_disagreement(certificate: Certificate, stacklevel: int) -> None:
    if certificate.disagreement:
        warnings.warn(certificate.disagreement, stacklevel=stacklevel + 1)


def _square(outputs: list[Tensor]) -> float:
    return sum(float(x.square().sum()) for x in outputs)


def _mean_square(before: list[Tensor], masked: list[Tensor], batches: int) -> float:
    """Squared norm of the change's mean over all samples, counted once a sample."""
    leaves = len(before) // batches
    total = 0.0
    for leaf in range(leaves):
        changes = [b - a for a, b in zip(before[leaf::leaves], masked[leaf::leaves], strict=True)]
        samples = sum(len(c) for c in changes) if changes[0].dim() else 0
        if samples and len({c.shape[1:] for c in changes}) == 1:
            total += float((sum(c.sum(0) for c in changes) / samples).square().sum()) * samples
    return total
