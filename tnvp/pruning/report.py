"""What a prune event did: plain data, printed as a short text."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .certificate import Certificate
from .channels import NeuronGroup
from .surgery import Cuts


@dataclass(frozen=True)
class GroupReport:
    """What one event did to one group. Indices are those the group's neurons had just before the event."""

    name: str
    producers: list[str]
    passengers: list[str]
    consumers: list[str]
    removed: list[int]
    kept: list[int]
    scores: Tensor | None  # [N], higher is more needed; None where nothing was scored, as by `rebuild`
    removed_in: dict[str, list[int]]  # layer → indices removed on that layer's own dimension
    removed_ids: list[int]  # the removed neurons' ids at birth
    kept_ids: list[int]

    @property
    def threshold(self) -> float | None:
        """The highest score among the removed neurons; None if none was removed."""
        return float(self.scores[self.removed].max()) if self.removed and self.scores is not None else None


@dataclass(frozen=True)
class PruneReport:
    """One prune event. Fractions are of the original network; ``output_error`` needs calibration data."""

    requested: dict[str, float]
    neuron_sparsity: float
    parameter_sparsity: float
    flops_reduction: float | None
    parameters: int
    flops: int | None  # of example_inputs, one forward pass
    output_error: float | None  # ‖after − before‖ / ‖before‖ over the calibration batches' outputs
    certificate: Certificate | None  # what was predicted of that, and what was not
    groups: list[GroupReport] = field(repr=False)
    cuts: Cuts = field(repr=False)
    mode: str = "rebuild"
    seconds: float = 0.0  # of the whole event, its proof and measurements too
    keeps_norms: bool = False  # batch norms go on with the running statistics of the unpruned network
    recalibrated_error: float | None = (
        None  # output_error after the batch norms' recalibration, where that was asked for
    )

    def __str__(self) -> str:
        asked = ", ".join(f"asked for {name} {value:g}" for name, value in self.requested.items()) or "rebuilt"
        lines = [
            f"{asked}: {self.neuron_sparsity:.1%} of the neurons and "
            f"{self.parameter_sparsity:.1%} of the parameters are gone"
            + (f", FLOPs down {self.flops_reduction:.1%}" if self.flops_reduction is not None else "")
        ]
        if self.mode == "mask":
            lines[0] += "; masked only: shapes and speed are as before until rebuild()"
        if self.certificate is not None:
            lines.append(f"on the calibration data, {self.certificate}")
        if self.recalibrated_error is not None:
            lines.append(f"once batch norms were recalibrated, the output differed by {self.recalibrated_error:.2%}")
        if self.keeps_norms:
            lines.append(
                "batch norms still hold the unpruned network's statistics: prune(bn_recalibrate=batches) renews them"
            )
        lines += [f"  {g.name}: {len(g.removed) + len(g.kept)} → {len(g.kept)} neurons" for g in self.groups]
        return "\n".join(lines)


def group_report(group: NeuronGroup, kept: Tensor, present: Tensor, scores: Tensor | None, ids: Tensor) -> GroupReport:
    """The report on ``group``, as it is before the event, when of the neurons ``present`` only ``kept`` stay.

    Neurons that are masked already are not present; ``ids`` [N] are those at birth.
    """
    removed = present[~torch.isin(present, kept)]
    removed_in = {
        layer: torch.isin(neuron, removed).nonzero().flatten().tolist() for (layer, _), neuron in group.maps.items()
    }
    return GroupReport(
        name=group.name,
        producers=group.producers,
        passengers=group.passengers,
        consumers=group.consumers,
        removed=removed.tolist(),
        kept=kept.tolist(),
        scores=scores,
        removed_in=removed_in,
        removed_ids=ids[removed].tolist(),
        kept_ids=ids[kept].tolist(),
    )
