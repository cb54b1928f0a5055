"""Arithmetic: element by element, along dimensions, and products of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, fx

from ..atoms import varying
from .base import Fields, blocked_along, source_of, unknown

if TYPE_CHECKING:
    from ..graph import Walk


Operand = tuple[Sequence[int], list[Tensor], str]  # shape, fields, what it is in words


def _operand(walk: Walk, source: fx.Node) -> Operand:
    what = f"{source.target}, a tensor of fixed size," if source.op == "get_attr" else "a tensor of fixed size"
    return walk.value(source).shape, walk.fields[source], what


def _meet(walk: Walk, node: fx.Node, operands: Sequence[Operand], dims: int) -> list[Tensor]:
    """Fields of what is computed element by element from operands, broadcast to ``dims`` dimensions."""
    aligned = [
        (
            (1,) * (dims - len(shape)) + tuple(shape),
            [f.reshape((1,) * (dims - f.dim()) + f.shape) for f in fields],
            what,
        )
        for shape, fields, what in operands
    ]
    met: list[Tensor] = []
    for _, fields, what in aligned:
        for field in fields:
            overlapping = [other for other in met if varying(other) & varying(field)]
            for other in overlapping:
                field = walk.atoms.compact(walk.atoms.unite(other, field, f"meets {what} in {node.name}"))
            met = [other for other in met if not any(other is gone for gone in overlapping)] + [field]
    for shape, fields, what in aligned:
        for field in met:
            if {d for d in varying(field) if shape[d] > 1} - set().union(*map(varying, fields)):
                walk.atoms.block([field], f"meets {what} in {node.name}")
    return [field for field in met if varying(field)]


def elementwise(walk: Walk, node: fx.Node, result) -> Fields | None:
    if not isinstance(result, Tensor):
        return unknown(walk, node, result)
    sources = [source for source in node.all_input_nodes if isinstance(walk.value(source), Tensor)]
    return _meet(walk, node, [_operand(walk, source) for source in sources], result.dim())


def matmul(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    """[…, n, k] × […, k, m]: neurons along n, m or the batch go on; those along k are summed over."""
    left, right = node.args[:2] if len(node.args) > 1 else (*node.args, *node.kwargs.values())
    if not all(isinstance(walk.value(x), Tensor) and walk.value(x).dim() > 1 for x in (left, right)):
        return unknown(walk, node, result)
    operands = [_without(walk, node, left, [-1]), _without(walk, node, right, [-2])]
    return _meet(walk, node, operands, result.dim())


def scaled_dot_product_attention(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """q […, T, D], k […, S, D], v […, S, E]: neurons along E or the batch, such as whole heads, go on."""
    arguments = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False)) | node.kwargs
    reduced = {"query": [-1], "key": [-2, -1], "value": [-2], "attn_mask": [-1]}
    operands = [
        _without(walk, node, arguments[name], dims)
        for name, dims in reduced.items()
        if isinstance(walk.value(arguments.get(name)), Tensor)
    ]
    if arguments.get("enable_gqa"):
        walk.block_inputs(node, f"its heads are shared in {node.name}")
        return []
    return _meet(walk, node, operands, result.dim())


def _without(walk: Walk, node: fx.Node, source: fx.Node, dims: list[int]) -> Operand:
    """An operand once ``dims`` are summed over; neurons along these are blocked."""
    shape = list(walk.value(source).shape)
    gone = {dim % len(shape) for dim in dims}
    summed = [field for field in walk.fields[source] if varying(field) & gone]
    walk.atoms.block(summed, f"is multiplied with other neurons and summed over in {node.name}")
    fields = [field for field in walk.fields[source] if not varying(field) & gone]
    return [1 if dim in gone else size for dim, size in enumerate(shape)], fields, _operand(walk, source)[2]


def glu(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """The halves of a dimension are multiplied: neurons at the same place of both go together."""
    dim = walk.layers[node.target].dim if node.op == "call_module" else node.kwargs.get("dim", (*node.args, -1)[1])
    dim = dim % result.dim()
    kept = []
    for field in walk.fields[source_of(node)]:
        if dim in varying(field):
            first, second = field.chunk(2, dim)
            field = walk.atoms.compact(walk.atoms.unite(first, second, f"meets a tensor of fixed size in {node.name}"))
        kept.append(field)
    return kept


def over(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """softmax and its like: work over dimensions that stay."""
    return blocked_along(walk, node, _dims(walk, node))


def normalize(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    return blocked_along(walk, node, [node.kwargs.get("dim", (*node.args, 2.0, 1)[2] if len(node.args) > 2 else 1)])


def reduced(walk: Walk, node: fx.Node, result) -> Fields | None:
    """mean, sum, amax …: work over dimensions that go. The maximum of two tensors is taken element by element."""
    if sum(isinstance(walk.value(source), Tensor) for source in node.all_input_nodes) > 1:
        return elementwise(walk, node, result)
    dims, rank = _dims(walk, node), walk.value(source_of(node)).dim()
    fields = blocked_along(walk, node, dims)
    if dims is None:
        return None
    first = result if isinstance(result, Tensor) else result[0]
    if first.dim() != rank:
        fields = [field.squeeze([dim % rank for dim in dims]) for field in fields]
    return fields if isinstance(result, Tensor) else tuple(fields for _ in result)


def _dims(walk: Walk, node: fx.Node) -> list[int] | None:
    """The dimensions an operation was told to work over; None: all."""
    if node.op == "call_module":
        dim = walk.layers[node.target].dim
    else:
        dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else None))
    if isinstance(dim, int) and not isinstance(dim, bool):
        return [dim]
    return list(dim) if isinstance(dim, tuple | list) and all(isinstance(d, int) for d in dim) else None


def pool(walk: Walk, node: fx.Node, result) -> Fields | None:
    if not isinstance(result, Tensor):
        return unknown(walk, node, result)
    what = type(walk.layers[node.target]).__name__ if node.op == "call_module" else node.target.__name__
    return blocked_along(walk, node, list(range(result.dim() - int(what[-2]), result.dim())))


def resized(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """Upsampling works over every dimension behind the channels."""
    return blocked_along(walk, node, list(range(2, result.dim())))


def padded(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    old = walk.value(source_of(node)).shape
    return blocked_along(walk, node, [dim for dim in range(result.dim()) if result.shape[dim] != old[dim]])
