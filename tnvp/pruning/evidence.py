"""What a criterion may look at: for each layer that writes, carries or reads a group, its weights and what was recorded there.

Shapes: N neurons of the group, P positions of a layer's dimension, K layers of the group, U and L as in `recorder`. Where several
layers write or read the group, each gives a score, and `COUPLINGS` makes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .channels import NeuronGroup
from .errors import PruningError
from .layers import BATCH_NORMS, weights_by_position
from .moments import Moments
from .recorder import Recorder, Signal

COUPLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # name → function of [K, N] scores and [K, N] whether the layer has the neuron (where not, its score is 0)
    "mean": lambda scores, has: scores.sum(0) / has.sum(0).clamp(min=1),
    "sum": lambda scores, has: scores.sum(0),
    "max": lambda scores, has: scores.amax(0),
}


@dataclass(frozen=True)
class Side:
    """One layer seen from the group: its weight, the neuron [P] at each position, and what was recorded there.

    ``nonzero`` and ``taylor`` are the moments of these quantities, ``covariance`` that of what a consumer reads ([U, U]
    and L, None where it is too large); each is there only for the criterion that asks for it.
    """

    layer: str
    weight: Tensor  # moved so that dimension 0 is the group's: [P, …]
    neuron: Tensor  # [P], −1 where the position belongs to another group
    moments: Moments | None = None
    nonzero: Moments | None = None
    taylor: Moments | None = None
    covariance: tuple[Tensor, int] | None = None

    def sum_by_neuron(self, values: Tensor, size: int) -> Tensor:
        """Add the values [P] of the positions up to the neurons [N] that own them."""
        neuron = self.neuron.to(values.device)
        mine = neuron >= 0
        return values.new_zeros(size).index_add(0, neuron[mine], values[mine])


@dataclass(frozen=True)
class Evidence:
    """What a criterion may look at for one group of ``size`` neurons."""

    group: str
    size: int
    producers: list[Side]
    consumers: list[Side]
    generator: torch.Generator
    norms: list[Side] = field(default_factory=list)  # batch norms with a weight that carry the group
    coupled: str = "mean"

    def couple(self, sides: Sequence[Side], score: Callable[[Side], Tensor]) -> Tensor:
        """One score [N] from those that ``score`` gives for each layer."""
        scores = torch.stack([score(side).cpu().double() for side in sides])
        has = torch.stack([side.sum_by_neuron(torch.ones(len(side.neuron)), self.size) > 0 for side in sides])
        return COUPLINGS[self.coupled](scores, has)

    def sampled(self, sides: Sequence[Side], what: str, signal: str, least: int, hint: str = "") -> list[Side]:
        """The layers where ``what`` has at least ``least`` samples: one that never ran tells nothing. Raises if none has."""
        counts = [moments.count if (moments := getattr(side, what)) is not None else 0 for side in sides]
        enough = [side for side, count in zip(sides, counts, strict=True) if count >= least]
        if not enough:
            raise PruningError(
                f"group {self.group!r}: {max(counts, default=0)} samples of its {signal} were recorded and the criterion "
                f"needs at least {least}: "
                + (hint or "run your loop inside `with pruner.record():`, or pass prune(calibration=…)")
            )
        return enough


def evidence_for(
    model: nn.Module, group: NeuronGroup, recorder: Recorder, kind: str | None, coupled: str, generator: torch.Generator
) -> Evidence:
    """The evidence on one group for a criterion that needs ``kind`` recorded."""

    def side(signal: Signal) -> Side:
        layer, direction = signal
        seen = {quantity: recorder.checked(signal, quantity) for quantity in ("value", "nonzero", "taylor")}
        moments = seen.pop("value")
        ran = direction == "in" and moments is not None and moments.count > 1
        covariance = recorder.covariance(layer) if kind == "covariance" and ran else None
        weight = weights_by_position(model.get_submodule(layer), direction)
        return Side(layer, weight, group.maps[signal], moments, covariance=covariance, **seen)

    modules = {name: model.get_submodule(name) for name in group.passengers}
    norms = [name for name, m in modules.items() if isinstance(m, BATCH_NORMS) and m.weight is not None]
    written = recorder.written(group) if kind == "preactivation" else [(name, "out") for name in group.producers]
    return Evidence(
        group=group.name,
        size=group.size,
        producers=[side(signal) for signal in written],
        consumers=[side((name, "in")) for name in group.consumers],
        norms=[side((name, "out")) for name in norms],
        generator=generator,
        coupled=coupled,
    )
