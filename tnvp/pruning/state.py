"""What a pruner's state must be before anything follows it: all of it is read first, and copied.

Shapes: N neurons of a group as it was born, K that are left, M of these that are not masked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .errors import PruningError, damaged

Indices = dict[str, Tensor]


def read_state(state: dict, sizes: dict[str, int], model: nn.Module) -> dict:
    """The parts of ``state`` but "recorded", checked: "kept" [K] of ``sizes`` [N], "masked" [M] of K, "added" and "random".

    "random" comes as the generator it describes.

    Raises:
        PruningError: a part is missing or does not fit.
    """
    if not isinstance(state, dict):
        raise damaged(f"it is {type(state).__name__}, not a dictionary")
    _require_sizes(_part(state, "sizes", dict), sizes)
    kept = _read_indices("kept", _part(state, "kept", dict), sizes)
    masked = _part(state, "masked", dict)
    widths = {name: len(index) for name, index in kept.items()}
    return {
        "kept": kept,
        "masked": _read_indices("masked", masked, widths) if masked else {},
        "added": _read_added(_part(state, "added", list), model),
        "random": _read_generator(_part(state, "random", Tensor)),
    }


def _part(state: dict, name: str, kind: type) -> object:
    if name not in state:
        raise damaged(f"it lacks {name!r}")
    if not isinstance(state[name], kind):
        raise damaged(f"its {name!r} is {type(state[name]).__name__}, not {kind.__name__}")
    return state[name]


def _require_sizes(found: dict, sizes: dict[str, int]) -> None:
    """The same prunable groups of the same sizes: else the same indices would be other neurons."""
    for name in [*sizes, *found]:
        if found.get(name) != sizes.get(name):
            its, mine = (f"has {s[name]} neurons" if name in s else "is not prunable" for s in (found, sizes))
            raise PruningError(
                f"the state is of another network, or its pruner had other groups or ignore: group {name!r} {its} there and "
                f"{mine} here; build the network and its Pruner as they were"
            )


def _read_indices(part: str, found: dict, sizes: dict[str, int]) -> Indices:
    """Group → which of its ``sizes`` neurons stay, ascending."""
    if found.keys() != sizes.keys():
        raise damaged(f"its {part!r} has the groups {list(found)} and should have {list(sizes)}")
    for name, index in found.items():
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
            raise damaged(f"its {part!r} of group {name!r} is not a list of indices: {index!r}")
        inside = len(index) and int(index[0]) >= 0 and int(index[-1]) < sizes[name]
        if not inside or not bool((index.diff() > 0).all()):
            raise damaged(
                f"its {part!r} of group {name!r} should be ascending indices below {sizes[name]}, at least one, and is "
                f"{index.tolist()}"
            )
    return {name: found[name].to("cpu", copy=True) for name in sizes}


def _read_added(names: list, model: nn.Module) -> list[str]:
    layers = dict(model.named_modules())
    for name in names:
        if not isinstance(name, str) or name.rpartition(".")[0] not in layers:
            raise damaged(f"its 'added' names {name!r}, of a layer that this network lacks")
    return list(names)


def _read_generator(numbers: Tensor) -> torch.Generator:
    generator = torch.Generator()
    try:
        return generator.set_state(numbers.cpu())
    except (RuntimeError, TypeError) as error:
        raise damaged(f"its 'random' is no state of a generator ({error})") from error
