"""Data movement: the same operation that moves the values moves the atoms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..atoms import varying
from .base import Fields, blocked_along, source_of, unknown

if TYPE_CHECKING:
    from ..graph import Walk


def moved(walk: Walk, node: fx.Node, result) -> Fields:
    """Data movement: the same operation moves the atoms. None may get lost on the way."""
    source = source_of(node)
    found = [_redo(walk, node, source, field) for field in walk.fields[source]]
    for field, parts in zip(walk.fields[source], found, strict=True):
        parts = parts if isinstance(parts, tuple | list) else [parts]
        if not torch.isin(field.unique(), torch.cat([part.flatten() for part in parts]).unique()).all():
            walk.atoms.block([field], f"is cut at fixed positions in {node.name}")
    if isinstance(result, Tensor):
        return [walk.atoms.compact(field) for field in found]
    return tuple([walk.atoms.compact(parts[i]) for parts in found] for i in range(len(result)))


def _redo(walk: Walk, node: fx.Node, source: fx.Node, field: Tensor):
    """The node's operation on a field, spread over the source's shape."""
    full = field.expand(walk.value(source).shape)
    if node.op == "call_module":
        return walk.layers[node.target](full.double()).long()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: full if n is source else walk.env[n])
    if node.op == "call_function":
        return node.target(*args, **kwargs)
    method = "reshape" if node.target == "view" else node.target  # what is spread is not contiguous
    return getattr(args[0], method)(*args[1:], **kwargs)


def squeeze(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    if len(node.args) == 1 and not node.kwargs:
        walk.block_inputs(
            node, f"{node.name} names no dimension, and would drop a layer of one neuron: write squeeze(dim)"
        )
    return moved(walk, node, result)


def reshape(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    """A dimension that holds neurons may be split where one of the new sizes is free (−1, or made from a width).

    The other parts have fixed sizes, so neurons that differ only there go together: what stays is a full grid again.
    """
    source = source_of(node)
    if not walk.fields[source]:
        return None
    given = node.args[1:] or (node.kwargs.get("shape", node.kwargs.get("size")),)
    sizes = list(given) if isinstance(given[0], int | fx.Node) else list(given[0])
    fields = moved(walk, node, result)
    fixed = [
        (isinstance(s, fx.Node) and not any(walk.widths.get(s, {}).values())) or (isinstance(s, int) and s != -1)
        for s in sizes
    ]
    if len(sizes) != result.dim():  # the sizes came as one torch.Size
        fixed = [False] * result.dim()
    return [grid for field in fields if (grid := _as_grid(walk, node, field, fixed)) is not None]


def _as_grid(walk: Walk, node: fx.Node, field: Tensor, fixed: list[bool]) -> Tensor | None:
    dims = sorted(varying(field))
    free = [dim for dim in dims if not fixed[dim]]
    if not free:
        sizes = " × ".join(str(field.shape[dim]) for dim in dims)
        walk.atoms.block([field], f"the size {sizes} is hard-coded in {node.name}: write -1 or x.size(…) instead")
        return None
    stays = max(free, key=lambda dim: field.shape[dim])
    for dim in dims:
        if dim != stays:
            field = walk.atoms.tie(field, dim, f"meets a tensor of fixed size in {node.name}")
    return walk.atoms.compact(field)


def unflatten(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    source = source_of(node)
    if node.op == "call_module":
        dim, sizes = walk.layers[node.target].dim, walk.layers[node.target].unflattened_size
    else:
        arguments = dict(zip(("input", "dim", "sizes"), node.args, strict=False)) | node.kwargs
        dim, sizes = arguments["dim"], arguments["sizes"]
    dims = walk.value(source).dim()
    if not isinstance(dim, int) or not isinstance(sizes, tuple | list):
        return unknown(walk, node, result)
    fixed = [False] * result.dim()
    for i, size in enumerate(sizes):
        fixed[dim % dims + i] = not isinstance(size, fx.Node) and size != -1
    return [grid for f in moved(walk, node, result) if (grid := _as_grid(walk, node, f, fixed)) is not None]


def shuffle(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """Pixel and channel shuffles: channels that end in one channel, or at one place of its groups, go together."""
    module = walk.layers.get(node.target) if node.op == "call_module" else None
    groups = getattr(module, "groups", None) or (node.args[1] if node.target is F.channel_shuffle else None)
    if groups:
        for field in walk.fields[source_of(node)]:
            if 1 in varying(field):
                walk.atoms.tie(field.unflatten(1, (groups, -1)), 1, f"meets a tensor of fixed size in {node.name}")
    reason = f"meets a tensor of fixed size in {node.name}"
    tied = []
    for field in moved(walk, node, result):
        for dim in sorted(varying(field) - {result.dim() - 3}):
            field = walk.atoms.tie(field, dim, reason)
        tied.append(walk.atoms.compact(field))
    return tied


def split(walk: Walk, node: fx.Node, result: Sequence[Tensor]) -> Fields:
    """chunk, and split at sizes made from the width: neurons at the same place of each part go together."""
    source, arguments = source_of(node), node.args[1:]
    dim = node.kwargs.get("dim", arguments[1] if len(arguments) > 1 else 0)
    size = arguments[0] if arguments else node.kwargs.get("chunks", node.kwargs.get("split_size_or_sections"))
    equal = len({part.shape for part in result}) == 1
    is_chunk = node.target in (torch.chunk, "chunk", torch.tensor_split, "tensor_split") and isinstance(size, int)
    free = is_chunk or (isinstance(size, fx.Node) and any(walk.widths.get(size, {}).values()))
    dim = dim % walk.value(source).dim()
    for field in walk.fields[source]:
        if dim in varying(field) and equal and free:
            first, *others = field.chunk(len(result), dim)
            for other in others:
                walk.atoms.unite(first, other, f"meets a tensor of fixed size in {node.name}")
        elif dim in varying(field):
            walk.atoms.block([field], f"is split at fixed positions in {node.name}")
    return moved(walk, node, result)


def unbind(walk: Walk, node: fx.Node, result: Sequence[Tensor]) -> Fields:
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    blocked_along(walk, node, [dim])
    return moved(walk, node, result)


def cat(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    tensors = node.args[0] if node.args else node.kwargs["tensors"]
    dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
    if not isinstance(tensors, tuple | list) or not isinstance(dim, int):
        return unknown(walk, node, result)
    parts = [(list(walk.value(t).shape), walk.fields[t]) for t in tensors]
    if _is_stack(node):
        dim = dim % result.dim()
        parts = [([*shape[:dim], 1, *shape[dim:]], [f.unsqueeze(dim) for f in fields]) for shape, fields in parts]
    if any(len(fields) > 1 for _, fields in parts):
        return unknown(walk, node, result)
    dim = dim % result.dim()
    spread = set().union(*(varying(field) for _, fields in parts for field in fields))
    if not spread:
        return None
    columns = []
    for shape, fields in parts:
        wide = [size if d == dim or d in spread else 1 for d, size in enumerate(shape)]
        columns.append((fields[0] if fields else torch.tensor(-1)).expand(wide))
    field = torch.cat(columns, dim)
    if spread - {dim}:  # torch wants equal sizes there: what stands at the same place of each part goes together
        field = walk.atoms.tie(field, dim, f"meets a tensor of fixed size in {node.name}")
    return [walk.atoms.compact(field)]


def rolled(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """Neurons shifted along their own dimension would be others than before once some are gone."""
    arguments = dict(zip(("input", "shifts", "dims"), node.args, strict=False)) | node.kwargs
    dims = arguments.get("dims")
    blocked_along(walk, node, [dims] if isinstance(dims, int) else dims or None)
    return moved(walk, node, result)


def _is_stack(node: fx.Node) -> bool:
    return node.target is torch.stack
