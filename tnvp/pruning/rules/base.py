"""What the rules share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, fx, nn

from ..atoms import varying

if TYPE_CHECKING:
    from ..graph import Walk

Fields = list[Tensor] | tuple


def fields_in(fields: Fields) -> list[Tensor]:
    """All fields of a result, however nested."""
    return fields if isinstance(fields, list) else [field for part in fields for field in fields_in(part)]


def source_of(node: fx.Node) -> fx.Node:
    return node.args[0] if node.args else next(iter(node.kwargs.values()))


def nothing(walk: Walk, node: fx.Node, result) -> None:
    return None


def unknown(walk: Walk, node: fx.Node, result) -> None:
    if node.op == "call_module":
        module = walk.layers[node.target]
        name = type(module).__name__
        if hasattr(module, "parametrizations"):
            name = f"{node.target}, whose {', '.join(module.parametrizations)} is parametrized"
            return walk.block_inputs(
                node, f"goes through {name}: call remove_parametrizations first, register them anew after"
            )
        if isinstance(module, nn.RNNBase) and not module.bias:
            why = "has no bias to take over what a removed neuron was: make it with bias=True"
            return walk.block_inputs(node, f"is read by {node.target} ({name}), which {why}")
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return walk.block_inputs(node, f"goes through {name} ({node.name}), which is not understood")


def blocked_along(walk: Walk, node: fx.Node, dims: Sequence[int] | None) -> list[Tensor]:
    """What is left of the source's fields once an operation has worked along ``dims`` (None: all).

    Neurons that lie along these alone are blocked; those that lie along another dimension too, as behind a stack, go together.
    """
    source = source_of(node)
    rank = walk.value(source).dim()
    worked = set(range(rank)) if dims is None else {dim % rank for dim in dims}
    what = type(walk.layers[node.target]).__name__ if node.op == "call_module" else node.name
    reason = f"{what} works over its neurons"
    left = []
    for field in walk.fields[source]:
        if not varying(field) - worked:
            walk.atoms.block([field], reason)
            continue
        for dim in sorted(varying(field) & worked):
            field = walk.atoms.tie(field, dim, reason)
        left.append(walk.atoms.compact(field))
    return left
