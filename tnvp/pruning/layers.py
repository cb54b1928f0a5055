"""What each layer type holds per neuron: the one table that channels, surgery and checkpoints share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class LayerKind:
    """Where a layer's tensors hold neurons.

    ``outputs`` / ``inputs``: tensor name → the dimension indexed by the neurons it writes / reads.
    ``sizes``: attribute → (tensor name, dimension) it must equal. ``channel``: the neurons' dimension in its input and output.
    A passenger treats each neuron by itself: it has ``outputs`` only.
    """

    outputs: dict[str, int]
    inputs: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, tuple[str, int]] = field(default_factory=dict)
    channel: int = 1

    @property
    def is_passenger(self) -> bool:
        return not self.inputs


LINEAR = LayerKind(
    outputs={"weight": 0, "bias": 0},
    inputs={"weight": 1},
    sizes={"out_features": ("weight", 0), "in_features": ("weight", 1)},
    channel=-1,
)
CONVOLUTION = LayerKind(
    outputs={"weight": 0, "bias": 0},
    inputs={"weight": 1},
    sizes={"out_channels": ("weight", 0), "in_channels": ("weight", 1)},
)
BATCH_NORM = LayerKind(outputs={"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0})


def kind_of(module: nn.Module) -> LayerKind | None:
    """The layer's kind, or None where the method doesn't know how to shrink it."""
    if type(module) is nn.Linear:
        return LINEAR
    if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.groups == 1:
        return CONVOLUTION
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and module.num_features:
        return BATCH_NORM
    return None


def synchronise_sizes(module: nn.Module) -> None:
    """Make ``in_features``, ``num_features`` and their like say what the layer's tensors are."""
    kind = kind_of(module)
    for attribute, (tensor, dim) in kind.sizes.items():
        setattr(module, attribute, getattr(module, tensor).shape[dim])
    if kind is BATCH_NORM:
        tensors = (module.weight, module.running_mean)
        module.num_features = next((len(t) for t in tensors if t is not None), module.num_features)
