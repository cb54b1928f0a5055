"""What each layer type holds per neuron: the one table that graph, surgery, compensation and checkpoints share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.rnn import PackedSequence

from .attention import Attention


@dataclass(frozen=True)
class LayerKind:
    """Where a layer's tensors hold neurons.

    ``outputs`` / ``inputs``: tensor name → the dimension indexed by the neurons it writes / reads; the first one is the weight.
    ``folds``: weight that reads → the bias that takes a constant it read. ``sizes``: attribute → (tensor name, dimension) it must equal.
    A passenger treats each neuron, or each whole group of them, by itself, and has ``outputs`` only; a mixer does not, though it
    keeps the neurons apart. ``others``: attributes that ``synchronise(module, neurons)`` sets, a passenger's width first.
    """

    outputs: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    folds: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, tuple[str, int]] = field(default_factory=dict)
    is_passenger: bool = False
    is_mixer: bool = False
    synchronise: Callable[[nn.Module, int], None] | None = None
    others: tuple[str, ...] = ()

    @property
    def attributes(self) -> tuple[str, ...]:
        """What tells the layer's widths, for a file that must rebuild it."""
        return (*self.sizes, *self.others)


def _grouped_sizes(module: nn.Module, neurons: int) -> None:
    """Whole groups of a convolution went: each one's share of outputs stays."""
    module.groups = neurons * module.groups // module.out_channels
    module.out_channels = neurons
    module.in_channels = module.groups * module.weight.shape[1] if not module.transposed else module.weight.shape[0]


def _group_norm_sizes(module: nn.Module, neurons: int) -> None:
    """Whole groups went; a single one, which mixes all channels, stays one."""
    if module.num_groups > 1:
        module.num_groups = neurons * module.num_groups // module.num_channels
    module.num_channels = neurons


def _layer_norm_sizes(module: nn.Module, neurons: int) -> None:
    module.normalized_shape = (neurons,)


def _batch_norm_sizes(module: nn.Module, neurons: int) -> None:
    module.num_features = neurons


def _attention_sizes(module: Attention, neurons: int) -> None:
    module.fit()


def _bias(weight_dim: int) -> dict[str, int]:
    return {"weight": weight_dim, "bias": 0}


LINEAR = LayerKind(
    outputs=_bias(0),
    inputs={"weight": 1},
    folds={"weight": "bias"},
    sizes={"out_features": ("weight", 0), "in_features": ("weight", 1)},
)
CONVOLUTION = LayerKind(
    outputs=_bias(0),
    inputs={"weight": 1},
    folds={"weight": "bias"},
    sizes={"out_channels": ("weight", 0), "in_channels": ("weight", 1)},
    others=("groups",),  # 1, but a grouped one may have come down to that
)
TRANSPOSED = LayerKind(
    outputs=_bias(1),
    inputs={"weight": 0},
    folds={"weight": "bias"},
    sizes={"out_channels": ("weight", 1), "in_channels": ("weight", 0)},
    others=("groups",),
)
GROUPED = LayerKind(
    outputs=_bias(0),
    is_passenger=True,
    synchronise=_grouped_sizes,
    others=("out_channels", "in_channels", "groups"),
)
BATCH_NORM = LayerKind(
    outputs={"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0},
    is_passenger=True,
    synchronise=_batch_norm_sizes,
    others=("num_features",),
)
PRELU = LayerKind(outputs={"weight": 0}, is_passenger=True, sizes={"num_parameters": ("weight", 0)})
GROUP_NORM = LayerKind(
    outputs=_bias(0), is_passenger=True, synchronise=_group_norm_sizes, others=("num_channels", "num_groups")
)
MIXING_GROUP_NORM = LayerKind(
    outputs=_bias(0),
    is_passenger=True,
    is_mixer=True,
    synchronise=_group_norm_sizes,
    others=("num_channels", "num_groups"),
)
LAYER_NORM = LayerKind(
    outputs=_bias(0), is_passenger=True, is_mixer=True, synchronise=_layer_norm_sizes, others=("normalized_shape",)
)
EMBEDDING = LayerKind(outputs={"weight": 1}, sizes={"embedding_dim": ("weight", 1)})
RECURRENT = LayerKind(
    inputs={"weight_ih_l0": 1}, folds={"weight_ih_l0": "bias_ih_l0"}, sizes={"input_size": ("weight_ih_l0", 1)}
)
BIRECURRENT = LayerKind(
    inputs={"weight_ih_l0": 1, "weight_ih_l0_reverse": 1},
    folds={"weight_ih_l0": "bias_ih_l0", "weight_ih_l0_reverse": "bias_ih_l0_reverse"},
    sizes=RECURRENT.sizes,
)
ATTENTION = LayerKind(  # its heads; the embedding it returns is written by its out_proj, a Linear
    outputs={"in_proj_weight": 0, "in_proj_bias": 0},
    inputs={"in_proj_weight": 1},
    folds={"in_proj_weight": "in_proj_bias"},
    synchronise=_attention_sizes,
    others=("embed_dim", "kdim", "vdim", "num_heads", "head_dim"),
)

LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
ATTENTIONS = (nn.MultiheadAttention, Attention)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The layer's kind, or None where the method doesn't know how to shrink it."""
    test = _KINDS.get(type(module))
    return test(module) if test else None


def _convolution(module: nn.Module) -> LayerKind | None:
    if module.groups == 1:
        return TRANSPOSED if module.transposed else CONVOLUTION
    return None if module.transposed and module.in_channels != module.out_channels else GROUPED


def _recurrent(module: nn.RNNBase) -> LayerKind | None:
    if not module.bias:
        return None
    return BIRECURRENT if module.bidirectional else RECURRENT


def _embedding(module: nn.Embedding) -> LayerKind | None:
    return None if module.sparse or module.max_norm is not None else EMBEDDING


def _attention(module: nn.MultiheadAttention) -> LayerKind | None:
    plain = module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn
    return ATTENTION if plain else None


_KINDS: dict[type, Callable[[nn.Module], LayerKind | None]] = {
    **dict.fromkeys(LINEARS, lambda module: LINEAR),
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS), _convolution),
    **dict.fromkeys((*BATCH_NORMS, *INSTANCE_NORMS), lambda module: BATCH_NORM if module.num_features else None),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _recurrent),
    **dict.fromkeys(ATTENTIONS, _attention),
    nn.PReLU: lambda module: PRELU if module.num_parameters > 1 else None,
    nn.GroupNorm: lambda module: GROUP_NORM if module.num_groups > 1 else MIXING_GROUP_NORM,
    nn.LayerNorm: lambda module: LAYER_NORM if len(module.normalized_shape) == 1 else None,
    nn.RMSNorm: lambda module: LAYER_NORM if len(module.normalized_shape) == 1 else None,
    nn.Embedding: _embedding,
}


def computed_tensors(module: nn.Module) -> list[str]:
    """Tensors of a layer that are no parameter or buffer: a hook computes them anew, and would undo a cut or a fold."""
    kind, held = kind_of(module), module._parameters.keys() | module._buffers.keys()
    names = {*kind.outputs, *kind.inputs, *kind.folds.values()} if kind else ()
    return sorted(name for name in names if name not in held and hasattr(module, name))


def spatial_dims(module: nn.Module) -> int:
    """Dimensions behind the neurons' in a layer's input and output: 2 for Conv2d, 0 for Linear."""
    name = type(module).__name__
    return int(name[-2]) if name.endswith(("1d", "2d", "3d")) else 0


def channel_dim(module: nn.Module, x: Tensor) -> int:
    """The dimension of ``x``, a layer's input or output, that holds its neurons."""
    if isinstance(module, (*BATCH_NORMS, nn.GroupNorm, nn.PReLU)):
        return min(1, x.dim() - 1)
    return x.dim() - 1 - spatial_dims(module)


def layer_input(args: tuple, kwargs: dict) -> Tensor:
    """What a layer was called with, by position or by name; of attention, the query, which is its key and value too."""
    return args[0] if args else kwargs.get("input", kwargs.get("query"))


def tensor_of(x: Tensor | PackedSequence) -> Tensor:
    """The values of a layer's input, of packed sequences too: their steps, one after the other."""
    return x.data if isinstance(x, PackedSequence) else x


def with_layer_input(args: tuple, kwargs: dict, x: Tensor) -> tuple[tuple, dict]:
    """The call's arguments with ``x`` in the place of `layer_input`, wherever that stands."""
    old = layer_input(args, kwargs)
    x = old._replace(data=x) if isinstance(old, PackedSequence) else x
    return tuple(x if a is old else a for a in args), {k: x if a is old else a for k, a in kwargs.items()}


def width(module: nn.Module, side: str) -> int:
    """Positions of the layer's own dimension on ``side`` "in" or "out"."""
    kind = kind_of(module)
    if kind.is_passenger and kind.others:
        size = getattr(module, kind.others[0])
        return size if isinstance(size, int) else size[0]
    tensor, dim = next(iter((kind.inputs if side == "in" else kind.outputs).items()))
    return getattr(module, tensor).shape[dim]


def weights_by_position(module: nn.Module, side: str) -> Tensor:
    """The weights [P, …] that belong to each position of ``side``: all incoming or all outgoing ones, flattened."""
    kind = kind_of(module)
    if side == "out":
        tensor, dim = next(iter(kind.outputs.items()))
        weight = getattr(module, tensor).detach().movedim(dim, 0)
        return weight.flatten(1) if weight.dim() > 1 else weight
    weights = [getattr(module, name).detach().movedim(dim, 0).flatten(1) for name, dim in kind.inputs.items()]
    return torch.cat(weights, 1)


def reading_weight(module: nn.Module, name: str) -> Tensor:
    """The weight seen from what it reads: [O, P, kernel …] for O outputs and P positions."""
    weight = getattr(module, name).detach()
    return weight.transpose(0, 1) if kind_of(module) is TRANSPOSED else weight


def response_to_constant(module: nn.Module, name: str) -> Tensor:
    """What each output [O] answers, in the inside of its image, to a constant 1 at each position: [O, P].

    A transposed convolution answers differently at each offset of its stride; this is the mean over these.
    """
    weight = reading_weight(module, name).double()
    response = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
    return response / prod(module.stride) if kind_of(module) is TRANSPOSED else response


def absorbs_constants(module: nn.Module) -> bool:
    """Whether a constant that a consumer read is exactly one in its bias: not for zero padding or most transposed convolutions."""
    kind = kind_of(module)
    if kind is TRANSPOSED:
        return False
    return kind is not CONVOLUTION or module.padding_mode != "zeros" or not _is_padded(module)


def _is_padded(module: nn.Module) -> bool:
    if isinstance(module.padding, str):
        return module.padding == "same" and prod(module.kernel_size) > 1
    return any(module.padding)


def synchronise_sizes(module: nn.Module, neurons: int) -> None:
    """Make ``in_features``, ``num_features``, ``groups`` and their like say what the layer's tensors are.

    ``neurons`` is how many positions stay where the layer's tensors need not tell.
    """
    kind = kind_of(module)
    for attribute, (tensor, dim) in kind.sizes.items():
        setattr(module, attribute, getattr(module, tensor).shape[dim])
    if kind.synchronise is not None:
        kind.synchronise(module, neurons)
