"""What each layer type holds per neuron: the one table that channels, surgery and checkpoints share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True)
class LayerKind:
    """Where a layer's tensors hold neurons.

    ``outputs`` / ``inputs``: tensor name → the dimension indexed by the neurons it writes / reads.
    ``sizes``: attribute → (tensor name, dimension) it must equal. A passenger treats each neuron by itself: it has ``outputs`` only.
    """

    outputs: dict[str, int]
    inputs: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def is_passenger(self) -> bool:
        return not self.inputs


LINEAR = LayerKind(
    outputs={"weight": 0, "bias": 0},
    inputs={"weight": 1},
    sizes={"out_features": ("weight", 0), "in_features": ("weight", 1)},
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


def computed_tensors(module: nn.Module) -> list[str]:
    """Tensors of a layer that are no parameter or buffer: a hook computes them anew, and would undo a cut or a fold."""
    held = module._parameters.keys() | module._buffers.keys()
    return [name for name in (kind_of(module).outputs if kind_of(module) else ()) if name not in held]


def spatial_dims(module: nn.Module) -> int:
    """Dimensions behind the neurons' in a layer's input and output: 2 for Conv2d, 0 for Linear."""
    name = type(module).__name__
    return int(name[-2]) if name.endswith(("1d", "2d", "3d")) else 0


def channel_dim(module: nn.Module, x: Tensor) -> int:
    """The dimension of ``x``, a layer's input or output, that holds its neurons."""
    if kind_of(module) is BATCH_NORM:
        return 1
    return x.dim() - 1 - spatial_dims(module)


def layer_input(args: tuple, kwargs: dict) -> Tensor:
    """What a layer was called with, by position or by name."""
    return args[0] if args else kwargs["input"]


def synchronise_sizes(module: nn.Module, neurons: int | None = None) -> None:
    """Make ``in_features``, ``num_features`` and their like say what the layer's tensors are.

    A batch norm without tensors is told its ``neurons``.
    """
    kind = kind_of(module)
    for attribute, (tensor, dim) in kind.sizes.items():
        setattr(module, attribute, getattr(module, tensor).shape[dim])
    if kind is BATCH_NORM:
        tensors = [t for t in (module.weight, module.running_mean) if t is not None]
        module.num_features = len(tensors[0]) if tensors else neurons or module.num_features
