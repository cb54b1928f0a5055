"""Optimizers follow surgery: the same indices cut the state, every parameter keeps its group, order and options."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import PruningError
from .surgery import ParameterChange

Migration = tuple[list[list[Tensor]], dict[Tensor, dict], list[list[str]]]


def plan_migration(optimizer: Optimizer, changes: Iterable[ParameterChange]) -> Migration:
    """The optimizer's parameters and state after the changes; the optimizer is untouched. Raises where a state can't be cut."""
    changes = [c for c in changes if isinstance(c.new, nn.Parameter)]
    replaced = {id(c.old): c for c in changes if c.old is not None}
    added = {id(c.beside): c for c in changes if c.old is None}
    parameters, names = [], []
    state = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    for group in optimizer.param_groups:
        parameters.append([])
        names.append([])
        for position, old in enumerate(group["params"]):
            name = group["param_names"][position] if "param_names" in group else None
            change = replaced.get(id(old))
            new = old if change is None else change.new
            parameters[-1].append(new)
            names[-1].append(name)
            if old in optimizer.state:
                state[new] = optimizer.state[old] if change is None else _cut_state(optimizer, change)
            if id(old) in added:
                bias = added[id(old)].new
                parameters[-1].append(bias)
                names[-1].append(name and f"{name.rpartition('.')[0]}.{added[id(old)].tensor}")
                fresh = _fresh_state(optimizer, group, bias, added[id(old)].layer)
                state |= {bias: fresh} if fresh else {}
    return parameters, state, names


def _cut_state(optimizer: Optimizer, change: ParameterChange) -> dict:
    cut = {}
    for key, value in optimizer.state[change.old].items():
        if isinstance(value, Tensor) and value.numel() > 1:
            if value.shape != change.old.shape:
                raise PruningError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for {change.layer}.{change.tensor} "
                    f"of shape {list(change.old.shape)}: such a state can't be cut. Make a new optimizer after pruning "
                    "(Pruner(optimizer=None)), or use one with states shaped like its parameters (SGD, Adam, AdamW, …)"
                )
            cut[key] = change.follow(value)
        elif isinstance(value, list | dict | tuple):
            raise PruningError(
                f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r}, which can't be cut"
            )
        else:
            cut[key] = value
    return cut


def _fresh_state(optimizer: Optimizer, group: dict, parameter: Tensor, layer: str) -> dict:
    """The state that the new bias of ``layer`` has in this optimizer: none, with two exceptions.

    Adagrad makes it in its constructor; fused SGD wants a momentum buffer for all parameters of a group or for none.
    Muon can't hold a bias at all.
    """
    if type(optimizer).__name__ == "Muon":  # by name: torch has it only lately, and other packages have theirs
        raise PruningError(
            f"{layer} has no bias for the constants of removed neurons, and Muon takes matrices only: "
            'use compensation="none", or give the layer a bias in another optimizer'
        )
    if isinstance(optimizer, torch.optim.SGD) and group.get("fused") and group["momentum"]:
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    return torch.optim.Adagrad([parameter], initial_accumulator_value=group["initial_accumulator_value"]).state[
        parameter
    ]


def execute_migration(optimizer: Optimizer, migration: Migration) -> None:
    """Put the planned parameters and state in place."""
    parameters, state, names = migration
    for group, members, labels in zip(optimizer.param_groups, parameters, names, strict=True):
        group["params"] = members
        if "param_names" in group:
            group["param_names"] = labels
    optimizer.state.clear()
    optimizer.state.update(state)


def check_membership(model: nn.Module, optimizers: Sequence[Optimizer], known: set[str]) -> None:
    """Prove that every parameter that was trained before (``known`` names) is in the optimizers exactly once."""
    held = _held(optimizers)
    if len(held) != len(set(held)):
        raise PruningError("the optimizers hold a parameter twice")
    missing = [name for name, p in model.named_parameters() if name in known and id(p) not in set(held)]
    if missing:
        raise PruningError(f"the optimizer lost {', '.join(missing)}")


def as_optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> Optimizer | list[Optimizer] | None:
    """One optimizer, or several in a list. Raises for anything else."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    several = list(optimizer) if isinstance(optimizer, Iterable) and not isinstance(optimizer, str) else [optimizer]
    if wrong := [o for o in several if not isinstance(o, Optimizer)]:
        raise PruningError(
            f"optimizer holds {wrong[0]!r}: give a torch.optim.Optimizer object, a list of them, or None"
        )
    return several


def as_list(optimizer: Optimizer | list[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse at once what could never be cut, or holds nothing of the model."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PruningError(
                "LBFGS keeps its history as flat vectors over all parameters, which can't be cut: "
                "give the Pruner optimizer=None and make a new LBFGS after pruning"
            )
        if not _held_names(model, optimizer):
            raise PruningError("the optimizer holds none of the model's parameters: was it made for another copy?")
    held = _held(optimizers)
    if len(held) != len(set(held)):
        raise PruningError("the optimizers hold a parameter twice: give each optimizer once, and each parameter one")


def trained_names(model: nn.Module, optimizers: Iterable[Optimizer], changes: Iterable[ParameterChange]) -> set[str]:
    """Names of the model's parameters that the optimizers hold, and of those that the changes add beside them."""
    trained = set().union(*(_held_names(model, optimizer) for optimizer in optimizers))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return trained | {f"{c.layer}.{c.tensor}" for c in changes if c.old is None and names.get(id(c.beside)) in trained}


def _held(optimizers: Iterable[Optimizer]) -> list[int]:
    """The ids of all parameters that the optimizers hold."""
    return [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _held_names(model: nn.Module, optimizer: Optimizer) -> set[str]:
    held = set(_held([optimizer]))
    return {name for name, p in model.named_parameters() if id(p) in held}


def warn_of_strangers(
    changes: Sequence[ParameterChange], trained: set[str], optimizers: Sequence[Optimizer], stacklevel: int
) -> None:
    """A parameter that only another optimizer holds would silently stop learning."""
    names = [f"{c.layer}.{c.tensor}" for c in changes if isinstance(c.old, nn.Parameter) and c.old.requires_grad]
    if not optimizers and any(c.old is not None and c.old.grad is not None for c in changes):
        warnings.warn(
            "the Pruner knows no optimizer, but the network has gradients: an optimizer made before goes on with the "
            "old parameters. Give it, Pruner(optimizer=…), or make a new one now",
            stacklevel=stacklevel + 1,
        )
    if optimizers and (strangers := [name for name in names if name not in trained]):
        warnings.warn(
            f"the Pruner's optimizer does not hold {', '.join(strangers)}: if another one trains them, "
            "it goes on with the old parameters. Give both: Pruner(optimizer=[a, b])",
            stacklevel=stacklevel + 1,
        )
