"""Sizes of tensors, and numbers made from them: which neurons they count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from ..atoms import varying
from .base import Fields, unknown
from .moves import moved

if TYPE_CHECKING:
    from ..graph import Walk


def size(walk: Walk, node: fx.Node, result) -> None:
    """``x.size()``, ``x.shape``, ``x.size(1)``, ``x.shape[1]``: which atoms the number counts."""
    source = node.all_input_nodes[0]
    value = walk.value(source)
    if isinstance(value, Tensor):
        counted = {dim: [f for f in walk.fields[source] if dim in varying(f)] for dim in range(value.dim())}
    else:
        counted = walk.widths.get(source, {})
    counted = {dim: fields for dim, fields in counted.items() if fields}
    asked = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if isinstance(result, torch.Size) and not isinstance(asked, slice):
        walk.widths[node] = counted
    elif isinstance(asked, int) and isinstance(value, Tensor | torch.Size):
        dims = value.dim() if isinstance(value, Tensor) else len(value)
        walk.widths[node] = {0: counted.get(asked % dims, [])}
    elif counted:
        walk.widths[node] = {0: [field for fields in counted.values() for field in fields]}


def size_attribute(walk: Walk, node: fx.Node, result) -> Fields | None:
    parts = walk.value(node.args[0])
    if isinstance(parts, tuple) and isinstance(walk.fields[node.args[0]], tuple):  # .values of max(dim)
        return next(f for part, f in zip(parts, walk.fields[node.args[0]], strict=True) if part is result)
    if isinstance(result, Tensor):
        return moved(walk, node, result) if node.args[1] in ("T", "mT") else unknown(walk, node, result)
    return size(walk, node, result) if node.args[1] == "shape" else None


def number(walk: Walk, node: fx.Node, result) -> None:
    """Something about a tensor that pruning doesn't change: its rank, dtype or device."""
    return unknown(walk, node, result) if isinstance(result, Tensor) else None


def getitem(walk: Walk, node: fx.Node, result) -> Fields | None:
    source, index = node.args
    value = walk.value(source)
    if isinstance(value, Tensor):
        parts = index if isinstance(index, tuple | list) else (index,)
        plain = all(part is None or part is Ellipsis or isinstance(part, int | slice | fx.Node) for part in parts)
        return moved(walk, node, result) if plain else unknown(walk, node, result)
    if isinstance(value, torch.Size):
        return size(walk, node, result)
    fields = walk.fields[source]
    if isinstance(fields, tuple) and isinstance(index, int | slice):
        return fields[index]
    return size(walk, node, result)
