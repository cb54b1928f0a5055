"""Neuron groups: the neurons that live or die together and the layers they touch; checked and completed when given by hand.

`graph.find_groups` finds them in a traced network.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .atoms import NO_NEURON
from .errors import PruningError
from .layers import ATTENTION, computed_tensors, kind_of, width


@dataclass(eq=False)
class NeuronGroup:
    """Neurons that live or die together, and the layers they touch, by qualified module name.

    By hand, for networks that torch.fx can't trace: ``NeuronGroup(producers=["fc1"], consumers=["fc2"])``; the rest is
    read off the layers. ``mixers`` are the passengers behind which pruning is approximate. ``maps[layer, side]`` (side
    "in" or "out") tells the neuron at each position of that layer's own dimension, −1 where it belongs to another group.
    """

    name: str = ""
    producers: list[str] = field(default_factory=list)
    passengers: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)
    size: int = 0
    prunable: bool = True
    reason: str = ""
    mixers: list[str] = field(default_factory=list)
    maps: dict[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)


class NeuronGroups(list):
    """A list of groups that prints as a table; groups that differ only in numbers of their layers' names share a row."""

    def __str__(self) -> str:
        alike: dict[tuple, list[NeuronGroup]] = {}
        for group in self:
            alike.setdefault(_pattern(group), []).append(group)
        rows = [_cells(groups) for groups in alike.values()]
        header = [["group"], ["neurons"], ["written by"], ["carried by"], ["read by"], ["prunable"]]
        widths = [max(len(line) for row in [header, *rows] for line in row[i]) for i in range(len(header))]
        lines = _lines(header, widths)
        lines.append("-" * min(len(lines[0].rstrip()), 100))
        lines += [line for row in rows for line in _lines(row, widths)]
        prunable, size = sum(g.size for g in self if g.prunable), sum(g.size for g in self)
        lines += [
            "",
            f"{sum(g.prunable for g in self)} of {len(self)} groups, {prunable:,} of {size:,} neurons, can be pruned. "
            "A neuron goes from all layers of its group at once.",
        ]
        return "\n".join(lines)


def _pattern(group: NeuronGroup) -> tuple:
    """What groups have in common that differ only in numbers of their layers' names."""
    names = (group.producers, group.passengers, group.consumers, [group.reason])
    return group.size, *(tuple(re.sub(r"\d+", "#", name) for name in part) for part in names)


def _cells(groups: list[NeuronGroup]) -> list[list[str]]:
    """The cells of one row, each a list of lines; ``groups`` are alike."""
    first, *others = groups
    name = [first.name]
    if others:
        name += [f"+ {len(others)} alike, to", f"  {others[-1].name}"] if len(others) > 1 else [f"+ {others[0].name}"]
    heads = f"{first.name}.out_proj" in first.consumers
    size = [f"{first.size:,}{' heads' if heads else ''}"]
    layers = [_some(part) for part in (first.producers, first.passengers, first.consumers)]
    return [name, size, *layers, ["yes" if first.prunable else f"no: {first.reason}"]]


def _some(names: list[str], most: int = 6) -> list[str]:
    return (names if len(names) <= most else [*names[: most - 1], f"… {len(names) - most + 1} more"]) or ["–"]


def _lines(row: list[list[str]], widths: list[int]) -> list[str]:
    height = max(len(cell) for cell in row)
    filled = [cell + [""] * (height - len(cell)) for cell in row]
    return [
        "  ".join(cell[i].ljust(width) for cell, width in zip(filled, widths, strict=True)).rstrip()
        for i in range(height)
    ]


def complete_groups(model: nn.Module, groups: Iterable[NeuronGroup], approximate: bool = False) -> NeuronGroups:
    """Check hand-made groups against the model's layers and fill in names, sizes and maps."""
    modules = dict(model.named_modules())
    groups = [groups] if isinstance(groups, NeuronGroup) else groups
    if isinstance(groups, str) or not all(isinstance(group, NeuronGroup) for group in groups):
        raise PruningError('groups must be a list such as [tnvp.NeuronGroup(producers=["fc1"], consumers=["fc2"])]')
    complete = NeuronGroups(_complete(modules, group) for group in groups)
    claimed: dict[tuple[str, str], str] = {}
    shared = {name: names for names in shared_parameters(model) for name in names}
    for group in complete:
        if group.mixers and group.prunable and not approximate:
            raise PruningError(
                f"group {group.name!r} has the mixer {group.mixers[0]!r}, behind which pruning is not exact: "
                "approximate=True prunes it nevertheless"
            )
        for layer, side in group.maps if group.prunable else ():
            if (layer, side) in claimed and (group.maps[layer, side] >= 0).all():
                raise PruningError(
                    f"groups {claimed[layer, side]!r} and {group.name!r} both cut the {side}puts of {layer!r}"
                )
            if layer in shared:
                raise PruningError(
                    f"{layer!r} shares its weight or bias with another layer ({', '.join(shared[layer])})"
                )
            claimed[layer, side] = group.name
    return complete


def computed_by_hook(layer: str, tensor: str) -> str:
    """Why a layer with such a tensor can't be cut."""
    return f"a hook computes {layer}.{tensor} (weight norm, a pruning mask): remove it first"


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """The layers that hold the same parameter, or different ones over the same memory, a list for each."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                same = parameter.data_ptr() if parameter.numel() and not parameter.is_meta else id(parameter)
                owners.setdefault(same, []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _complete(modules: dict[str, nn.Module], group: NeuronGroup) -> NeuronGroup:
    name = group.name or (group.producers[0] if group.producers else "?")
    if group.maps or not group.prunable:
        return replace(group, name=name, maps=dict(group.maps))
    if not group.producers or not group.consumers:
        raise PruningError(f"group {name} needs at least one producer and one consumer")
    maps: dict[tuple[str, str], Tensor] = {}
    size, written = _whole_groups(modules, group.passengers), 0
    for side, layers in (("out", [*group.producers, *group.passengers]), ("in", group.consumers)):
        for layer in layers:
            positions = _width(modules, layer, side)
            if kind_of(modules[layer]) is ATTENTION and side == "out":  # heads, of three in-projections
                heads = modules[layer].num_heads
                maps[layer, side] = torch.arange(heads).repeat_interleave(positions // 3 // heads).repeat(3)
                size = size or heads
                continue
            size = size or positions
            written = written or positions
            if positions % size or (side == "out" and positions != written):
                raise PruningError(f"layer {layer!r} has {positions} {side}puts, which don't fit {size} neurons")
            maps[layer, side] = torch.arange(size).repeat_interleave(positions // size)
    mixers = [layer for layer in group.passengers if kind_of(modules[layer]).is_mixer]
    lists = (list(group.producers), list(group.passengers), list(group.consumers))
    return NeuronGroup(name, *lists, size, mixers=mixers, maps=maps)


def _whole_groups(modules: dict[str, nn.Module], passengers: Iterable[str]) -> int:
    """The neurons that passengers which work on groups leave: the most of which each one's groups are whole; 0 without any."""
    counts = [getattr(modules.get(name), attribute, 0) for name in passengers for attribute in ("groups", "num_groups")]
    return math.gcd(*(count for count in counts if count > 1))


def _width(modules: dict[str, nn.Module], layer: str, side: str) -> int:
    """The size of a layer's own dimension. Raises where the layer is unknown, or can't be cut there."""
    if layer not in modules:
        raise PruningError(f"a group names the layer {layer!r}, which the model lacks; it has {layer_names(modules)}")
    module, kind = modules[layer], kind_of(modules[layer])
    if computed := computed_tensors(module):
        raise PruningError(computed_by_hook(layer, computed[0]))
    if kind is None or not (kind.outputs if side == "out" else kind.inputs):
        raise PruningError(f"layer {layer!r} ({type(module).__name__}) can't be a {side}put layer of a group")
    return width(module, side)


def layer_names(modules: dict[str, nn.Module]) -> list[str]:
    """The layers that groups can name."""
    return [name for name, module in modules.items() if kind_of(module) is not None]


def as_arguments(inputs) -> tuple:
    """What one forward pass takes: a tuple of arguments, or one argument alone."""
    if isinstance(inputs, torch.utils.data.DataLoader):
        raise PruningError("example_inputs is a DataLoader: give one batch of inputs, without labels")
    return inputs if isinstance(inputs, tuple) else (inputs,)


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy; activations that the network keeps as attributes are copied without their graph."""
    kept = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    try:
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in kept})
    except Exception as error:
        raise PruningError(f"{type(model).__name__} can't be copied, as a trial of the cut needs: {error}") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own mode again after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def shrink(group: NeuronGroup, kept: Tensor, cuts: dict[tuple[str, str], Tensor]) -> None:
    """Follow an event: only the neurons ``kept`` stay, and only the positions ``cuts`` of each dimension.

    A dimension that the group shares with others, as behind a concatenation, loses their positions too.
    """
    renumbered = torch.full((group.size + 1,), NO_NEURON)
    renumbered[kept] = torch.arange(len(kept))
    for where, neuron in group.maps.items():
        group.maps[where] = renumbered[neuron[cuts[where]] if where in cuts else neuron]
    group.size = len(kept)


def check_widths(model: nn.Module, groups: Iterable[NeuronGroup]) -> None:
    """Raise where a layer has another width than when the groups were found."""
    modules = dict(model.named_modules())
    for group in groups:
        for (layer, side), neuron in group.maps.items() if group.prunable else ():
            if kind_of(modules.get(layer)) is None or width(modules[layer], side) != len(neuron):
                raise PruningError(
                    f"{layer!r} is not the layer it was when this Pruner was made ({len(neuron)} {side}puts): "
                    "another Pruner or your code has changed it. Make a new Pruner"
                )


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters and buffers that a state holds."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
