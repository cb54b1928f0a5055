"""Leaves of the autograd graph that remember another shape than they have.

A leaf's `AccumulateGrad` node records the leaf's shape when it is made, and lives as long as any graph built
on it. Assigning to a parameter's `.data` meanwhile changes the shape behind the node's back, and the next
backward checks its gradient against the old record. tests/test_autograd.py tells it all, fact by fact.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from tnvp.pruning.errors import PruningError


def stale_leaves(model: nn.Module) -> list[str]:
    """Names of the parameters whose autograd node remembers another shape, dtype or device; [] when healthy.

    A tied parameter is named once, by its first name. Passed over, having no node to be stale: frozen
    parameters (the old node may come back when they are unfrozen), lazy ones not yet initialised, and ones
    made under `torch.inference_mode()`. Reading changes nothing and leaves nothing behind.

    Raises PruningError if a node can't be read: an unreadable node is never taken for a healthy one.
    """
    return [
        name
        for name, parameter in model.named_parameters()
        if _has_node(parameter) and _recorded(name, parameter) != _present(parameter)
    ]


def _has_node(parameter: torch.Tensor) -> bool:
    # Lazy first: an uninitialised parameter refuses the questions that follow. `is_leaf` matters inside
    # torch.func.functional_call, where a module's weights may be another computation's results.
    if is_lazy(parameter) or parameter.is_inference():
        return False
    return parameter.requires_grad and parameter.is_leaf


def _present(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(parameter.shape), parameter.dtype, parameter.device


def _recorded(name: str, parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """What the parameter's node expects of a gradient. A node made only for this question dies with it."""
    try:
        # The edge is found by a tiny forward, which inference mode would not record.
        with torch.inference_mode(False):
            node = get_gradient_edge(parameter).node
        # Underscored, yet it is what torch.autograd.backward itself reads when handed a gradient edge.
        record = node._input_metadata[0]
        return tuple(record.shape), record.dtype, record.device
    except Exception as error:  # whatever the cause, the news is the same: nobody can vouch for it
        raise PruningError(
            f"can't tell whether parameter {name!r} is stale: torch {torch.__version__} doesn't let the "
            f"autograd node of this {parameter.layout} parameter be read ({type(error).__name__}: {error}). "
            f"stale_leaves needs torch 2.9 or later and strided, not nested, parameters; do without it here."
        ) from error
