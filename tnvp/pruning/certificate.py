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

    def __str__(self) -> str:
        text = (
            f"the masked network's output differs by {self.predicted:.2%} (mean {self.mean_part:.2%}, remainder "
            f"{self.remainder:.2%}), the pruned one's by {self.measured:.2%}; border {self.border_part:.2%}"
        )
        return f"{text}\n{self.disagreement}" if self.disagreement else text


Outputs = list[list[Tensor]]  # batches × leaves, each [B, …]


def certify(before: Outputs, masked: Outputs, after: Outputs, excuses: list[str], dtype: torch.dtype) -> Certificate:
    """Compare outputs; ``excuses``: layers that can't absorb a constant."""
    predicted, measured = relative_error(before, masked), relative_error(before, after)
    scale = max(_square(before), 1e-300)
    border = relative_error(masked, after) * math.sqrt(_square(masked) / scale)
    mean = math.sqrt(_mean_square(before, masked) / scale)
    remainder = math.sqrt(max(predicted**2 - mean**2, 0.0))
    tolerance = TOLERANCE.get(dtype, 0.1)
    disagreement = ""
    if not border <= (max(tolerance, predicted) if excuses else tolerance):
        disagreement = (
            f"the pruned network's output changed by {measured:.2%}, the masked one's by {predicted:.2%}, and they differ by "
            f"{border:.2%}; {_cause(excuses)}"
        )
    return Certificate(predicted, measured, mean, remainder, border, disagreement)


def _cause(excuses: list[str]) -> str:
    if not excuses:
        return "nothing in the network explains it: please report it with the network"
    names = ", ".join(excuses[:3]) + (f" and {len(excuses) - 3} more" if len(excuses) > 3 else "")
    return (
        f"{names} can't take a constant into the bias exactly (zero padding, most of all of small images; strides; or a "
        'mixer). compensation="none" has no such part; fine-tuning repairs it'
    )


def excuses(model: nn.Module, groups: Iterable[NeuronGroup]) -> list[str]:
    """Layers of the groups behind which masked and rebuilt may differ."""
    groups = list(groups)
    consumers = dict.fromkeys(name for group in groups for name in group.consumers)
    mixers = [name for group in groups for name in group.mixers]
    return [name for name in consumers if not absorbs_constants(model.get_submodule(name))] + mixers


def warn_of_disagreement(certificate: Certificate, stacklevel: int) -> None:
    if certificate.disagreement:
        warnings.warn(certificate.disagreement, stacklevel=stacklevel + 1)


def _square(outputs: Outputs) -> float:
    return sum(float(x.square().sum()) for batch in outputs for x in batch)


def _mean_square(before: Outputs, masked: Outputs) -> float:
    """Squared norm of the change's mean over all samples, counted once a sample.

    Leaves that differ in number or shape from batch to batch have no such mean: each batch has its own then.
    """
    changes = [[b - a for a, b in zip(old, new, strict=True)] for old, new in zip(before, masked, strict=True)]
    alike = len({tuple(x.shape[1:] for x in batch) for batch in changes}) == 1
    leaves = zip(*changes, strict=True) if alike else [[x] for batch in changes for x in batch]
    total = 0.0
    for parts in leaves:
        samples = sum(len(x) for x in parts) if parts[0].dim() else 0
        if samples:
            total += float((sum(x.sum(0) for x in parts) / samples).square().sum()) * samples
    return total
