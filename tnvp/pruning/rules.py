"""What each operation of a traced network does to the atoms of its inputs.

A rule takes (walk, node, result) and gives the fields of the result: a list for a tensor, a tuple of such for a tuple. Data movement
needs no rule of its own: the same operation moves the atoms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .atoms import along, varying
from .layers import (
    ATTENTION,
    ATTENTIONS,
    BATCH_NORM,
    EMBEDDING,
    GROUP_NORM,
    GROUPED,
    LINEAR,
    MIXING_GROUP_NORM,
    PRELU,
    channel_dim,
    kind_of,
)

if TYPE_CHECKING:
    from .graph import Walk

Fields = list[Tensor] | tuple


def fields_in(fields: Fields) -> list[Tensor]:
    """All fields of a result, however nested."""
    return fields if isinstance(fields, list) else [field for part in fields for field in fields_in(part)]


def rule_of(walk: Walk, node: fx.Node) -> Callable:
    if node.op == "call_module":
        module = walk.layers[node.target]
        return _layer if kind_of(module) is not None else RULES.get(type(module), _unknown)
    if node.op == "call_function":
        name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"
        return RULES.get(node.target) or FOREIGN.get(name, _unknown)
    if node.op == "call_method":
        return RULES.get(node.target, _unknown)
    return {"output": _output, "get_attr": _attribute}.get(node.op, _nothing)


def _nothing(walk: Walk, node: fx.Node, result) -> None:
    return None


def _unknown(walk: Walk, node: fx.Node, result) -> None:
    if node.op == "call_module":
        module = walk.layers[node.target]
        name = type(module).__name__
        if hasattr(module, "parametrizations"):
            name = f"{node.target}, whose {', '.join(module.parametrizations)} is parametrized"
            return walk.block_inputs(
                node, f"goes through {name}: call remove_parametrizations first, register them anew after"
            )
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return walk.block_inputs(node, f"goes through {name} ({node.name}), which is not understood")


def _output(walk: Walk, node: fx.Node, result) -> None:
    walk.block_inputs(node, "is an output of the network")


def _attribute(walk: Walk, node: fx.Node, result) -> None:
    walk.read_directly.append(node.target)


# Sizes, and numbers made from them.


def follow_widths(walk: Walk, node: fx.Node, rule: Callable, result) -> None:
    """Numbers made from a width may become the sizes of a reshape; in any other computation they change its result."""
    if rule in (_size, _size_attribute, _getitem):
        return
    sources = (walk.widths.get(source, {}) for source in node.all_input_nodes)
    counted = [field for widths in sources for fields in widths.values() for field in fields]
    if not counted or rule in (_reshape, _split):
        return
    if (isinstance(result, int | float) and not isinstance(result, bool)) or (
        isinstance(result, tuple) and all(isinstance(size, int) for size in result)
    ):
        walk.widths[node] = {0: counted}
    else:
        walk.atoms.block(counted, f"its width enters a computation ({node.name})")


def _size(walk: Walk, node: fx.Node, result) -> None:
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


def _size_attribute(walk: Walk, node: fx.Node, result) -> Fields | None:
    if isinstance(result, Tensor):
        return _moved(walk, node, result) if node.args[1] in ("T", "mT") else _unknown(walk, node, result)
    return _size(walk, node, result) if node.args[1] == "shape" else None


def _number(walk: Walk, node: fx.Node, result) -> None:
    """Something about a tensor that pruning doesn't change: its rank, dtype or device."""
    return _unknown(walk, node, result) if isinstance(result, Tensor) else None


def _getitem(walk: Walk, node: fx.Node, result) -> Fields | None:
    source, index = node.args
    value = walk.value(source)
    if isinstance(value, Tensor):
        parts = index if isinstance(index, tuple | list) else (index,)
        plain = all(part is None or part is Ellipsis or isinstance(part, int | slice | fx.Node) for part in parts)
        return _moved(walk, node, result) if plain else _unknown(walk, node, result)
    if isinstance(value, torch.Size):
        return _size(walk, node, result)
    fields = walk.fields[source]
    if isinstance(fields, tuple) and isinstance(index, int | slice):
        return fields[index]
    return _size(walk, node, result)


# Layers.


def _source(node: fx.Node) -> fx.Node:
    return node.args[0] if node.args else next(iter(node.kwargs.values()))


def _layer(walk: Walk, node: fx.Node, result) -> Fields | None:
    name, module = node.target, walk.layers[node.target]
    kind = kind_of(module)
    if kind is ATTENTION:
        return _attention(walk, node, result)
    if kind is EMBEDDING:
        return [along(walk.write(name, module.embedding_dim), result.dim() - 1, result.dim())]
    source = _source(node)
    value = walk.value(source)
    if not isinstance(value, Tensor):
        return _unknown(walk, node, result)
    channel = channel_dim(module, value)
    fields, positions = _read_along(walk, walk.fields[source], channel, value.shape[channel], name)
    if kind.is_passenger:
        return _passenger(walk, node, fields, positions, channel, result)
    walk.pass_through(walk.read, name, positions)
    if not kind.outputs:  # recurrent: what it writes is its own
        walk.atoms.block(fields, f"lies along the steps that {name} goes over")
        return None
    fields = _beside(walk, fields, channel, f"lies along the space that {name} works over")
    return [*fields, along(walk.write(name, result.shape[channel]), channel, result.dim())]


def _read_along(walk: Walk, fields: list[Tensor], dim: int, size: int, reader: str) -> tuple[list[Tensor], Tensor]:
    """The atom [size] at each position of dimension ``dim``, and the fields that do not vary along it."""
    mine = [field for field in fields if dim in varying(field)]
    others = [field for field in fields if dim not in varying(field)]
    positions = torch.full((size,), -1)
    for field in mine:  # one at most: fields vary along different dimensions
        positions = walk.atoms.tie_all_but(field, dim, f"{reader} reads it together with a tensor of fixed size")
    return others, positions


def _beside(walk: Walk, fields: list[Tensor], channel: int, reason: str) -> list[Tensor]:
    """Fields along dimensions before the channel stay; a layer works over those behind it."""
    behind = [field for field in fields if max(varying(field), default=0) > channel]
    walk.atoms.block(behind, reason)
    return [field for field in fields if not any(field is other for other in behind)]


def _passenger(
    walk: Walk, node: fx.Node, fields: list[Tensor], positions: Tensor, channel: int, result: Tensor
) -> list[Tensor]:
    name, module = node.target, walk.layers[node.target]
    kind = kind_of(module)
    if kind is BATCH_NORM and isinstance(module, nn.modules.batchnorm._BatchNorm):
        walk.atoms.block(fields, f"lies along the space that {name} works over")  # or along its batch
        fields = []
    elif kind is not PRELU:
        fields = _beside(walk, fields, channel, f"lies along the space that {name} works over")
    if bool((positions < 0).all()) and name not in walk.carried:
        return fields
    if kind is GROUPED or kind is GROUP_NORM:
        groups = module.groups if kind is GROUPED else module.num_groups
        reason = f"is in one group of {name} with a tensor of fixed size"
        whole = walk.atoms.tie(positions.reshape(groups, -1), 1, reason).flatten()
        positions = whole.repeat_interleave(result.shape[channel] // groups)
    if kind.is_mixer and not walk.approximate:
        what = f"{type(module).__name__} with one group" if kind is MIXING_GROUP_NORM else type(module).__name__
        walk.atoms.block(
            [positions], f"{name} ({what}) mixes it with the other neurons: approximate=True prunes it nevertheless"
        )
    positions = walk.pass_through(walk.carried, name, positions)
    return [*fields, along(positions, channel, result.dim())]


def _attention(walk: Walk, node: fx.Node, result: tuple) -> Fields:
    """The embedding is read by the in-projection and written by the out-projection; the neurons between are whole heads."""
    name, module = node.target, walk.layers[node.target]
    inputs = dict(zip(("query", "key", "value"), node.args, strict=False)) | node.kwargs
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    width = walk.value(query).shape[-1]
    positions = torch.full((width,), -1)
    if query is key is value:
        others, positions = _read_along(walk, walk.fields[query], walk.value(query).dim() - 1, width, name)
        walk.atoms.block(others, f"lies along the tokens that {name} works over")
    else:
        walk.block_inputs(node, f"{name} attends from it to another tensor")
    if name in walk.read or bool((positions >= 0).any()):
        walk.pass_through(walk.read, name, positions)
    _heads(walk, name, module)
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 1 and user.users:
            walk.block_layer(name, f"the network uses the attention weights of {name}, which are a mean over all heads")
    embedding = walk.write(f"{name}.out_proj", module.out_proj.out_features)
    return ([along(embedding, result[0].dim() - 1, result[0].dim())], [])


def _heads(walk: Walk, name: str, module: nn.MultiheadAttention) -> None:
    """One neuron a head: its rows of the three in-projections, and its columns of the out-projection."""
    if name not in walk.written:
        features = walk.atoms.new(module.num_heads).repeat_interleave(module.head_dim)
        walk.written[name] = features.repeat(3)
        walk.read[f"{name}.out_proj"] = features


def _transformer(walk: Walk, node: fx.Node, result) -> None:
    """torch's own encoder and decoder layers: inside, their heads and the neurons between linear1 and linear2 can go."""
    walk.block_inputs(
        node, f"goes through {node.target} ({type(walk.layers[node.target]).__name__}), whose layer norms mix it"
    )
    for inner, module in walk.layers[node.target].named_modules(prefix=node.target):
        if isinstance(module, ATTENTIONS) and kind_of(module) is ATTENTION:
            _heads(walk, inner, module)
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            first, second = f"{inner}.linear1", f"{inner}.linear2"
            if kind_of(walk.layers[first]) is LINEAR and kind_of(walk.layers[second]) is LINEAR:
                walk.read[second] = walk.write(first, module.linear1.out_features)


# Operations on several tensors.


def _meet(walk: Walk, node: fx.Node, operands: Sequence[tuple[Sequence[int], list[Tensor]]], dims: int) -> list[Tensor]:
    """Fields of what is computed element by element from operands (shape, fields), broadcast to ``dims`` dimensions."""
    aligned = [
        ((1,) * (dims - len(shape)) + tuple(shape), [f.reshape((1,) * (dims - f.dim()) + f.shape) for f in fields])
        for shape, fields in operands
    ]
    reason = f"meets a tensor of fixed size in {node.name}"
    met: list[Tensor] = []
    for _, fields in aligned:
        for field in fields:
            overlapping = [other for other in met if varying(other) & varying(field)]
            for other in overlapping:
                field = walk.atoms.compact(walk.atoms.unite(other, field, reason))
            met = [other for other in met if not any(other is gone for gone in overlapping)] + [field]
    for shape, fields in aligned:
        for field in met:
            fixed = {d for d in varying(field) if shape[d] > 1} - set().union(*map(varying, fields))
            if fixed:
                walk.atoms.block([field], reason)
    return [field for field in met if varying(field)]


def _elementwise(walk: Walk, node: fx.Node, result) -> Fields | None:
    if not isinstance(result, Tensor):
        return _unknown(walk, node, result)
    sources = [source for source in node.all_input_nodes if isinstance(walk.value(source), Tensor)]
    return _meet(walk, node, [(walk.value(s).shape, walk.fields[s]) for s in sources], result.dim())


def _matmul(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    """[…, n, k] × […, k, m]: neurons along n, m or the batch go on; those along k are summed over."""
    left, right = node.args[:2] if len(node.args) > 1 else (*node.args, *node.kwargs.values())
    if not all(isinstance(walk.value(x), Tensor) and walk.value(x).dim() > 1 for x in (left, right)):
        return _unknown(walk, node, result)
    operands = [_without(walk, node, left, [-1]), _without(walk, node, right, [-2])]
    return _meet(walk, node, operands, result.dim())


def _scaled_dot_product_attention(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
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


def _without(walk: Walk, node: fx.Node, source: fx.Node, dims: list[int]) -> tuple[list[int], list[Tensor]]:
    """An operand (shape, fields) once ``dims`` are summed over; neurons along these are blocked."""
    shape = list(walk.value(source).shape)
    gone = {dim % len(shape) for dim in dims}
    summed = [field for field in walk.fields[source] if varying(field) & gone]
    walk.atoms.block(summed, f"is multiplied with other neurons and summed over in {node.name}")
    fields = [field for field in walk.fields[source] if not varying(field) & gone]
    return [1 if dim in gone else size for dim, size in enumerate(shape)], fields


def _cat(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    tensors = node.args[0] if node.args else node.kwargs["tensors"]
    dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
    if not isinstance(tensors, tuple | list) or not isinstance(dim, int):
        return _unknown(walk, node, result)
    parts = [(list(walk.value(t).shape), walk.fields[t]) for t in tensors]
    if _is_stack(node):
        dim = dim % result.dim()
        parts = [([*shape[:dim], 1, *shape[dim:]], [f.unsqueeze(dim) for f in fields]) for shape, fields in parts]
    if any(len(fields) > 1 for _, fields in parts):
        return _unknown(walk, node, result)
    dim = dim % result.dim()
    spread = set().union(*(varying(field) for _, fields in parts for field in fields))
    if not spread:
        return None
    columns = []
    for shape, fields in parts:
        wide = [size if d == dim or d in spread else 1 for d, size in enumerate(shape)]
        columns.append((fields[0] if fields else torch.tensor(-1)).expand(wide))
    return [walk.atoms.compact(torch.cat(columns, dim))]


def _is_stack(node: fx.Node) -> bool:
    return node.target is torch.stack


# Operations on one tensor.


def _moved(walk: Walk, node: fx.Node, result) -> Fields:
    """Data movement: the same operation moves the atoms. None may get lost on the way."""
    source = _source(node)
    moved = [_redo(walk, node, source, field) for field in walk.fields[source]]
    for field, parts in zip(walk.fields[source], moved, strict=True):
        arrived = torch.cat(
            [part.flatten() for part in (parts if isinstance(parts, tuple | list) else [parts])]
        ).unique()
        if not torch.isin(field.unique(), arrived).all():
            walk.atoms.block([field], f"is cut at fixed positions in {node.name}")
    if isinstance(result, Tensor):
        return [walk.atoms.compact(field) for field in moved]
    return tuple([walk.atoms.compact(parts[i]) for parts in moved] for i in range(len(result)))


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


def _squeeze(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    if len(node.args) == 1 and not node.kwargs:
        walk.block_inputs(
            node, f"{node.name} names no dimension, and would drop a layer of one neuron: write squeeze(dim)"
        )
    return _moved(walk, node, result)


def _reshape(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    """A dimension that holds neurons may be split where one of the new sizes is free (−1, or made from a width).

    The other parts have fixed sizes, so neurons that differ only there go together: what stays is a full grid again.
    """
    source = _source(node)
    if not walk.fields[source]:
        return None
    given = node.args[1:] or (node.kwargs.get("shape", node.kwargs.get("size")),)
    sizes = list(given) if isinstance(given[0], int | fx.Node) else list(given[0])
    fields = _moved(walk, node, result)
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


def _unflatten(walk: Walk, node: fx.Node, result: Tensor) -> Fields | None:
    source = _source(node)
    if node.op == "call_module":
        dim, sizes = walk.layers[node.target].dim, walk.layers[node.target].unflattened_size
    else:
        arguments = dict(zip(("input", "dim", "sizes"), node.args, strict=False)) | node.kwargs
        dim, sizes = arguments["dim"], arguments["sizes"]
    dims = walk.value(source).dim()
    if not isinstance(dim, int) or not isinstance(sizes, tuple | list):
        return _unknown(walk, node, result)
    fixed = [False] * result.dim()
    for i, size in enumerate(sizes):
        fixed[dim % dims + i] = not isinstance(size, fx.Node) and size != -1
    return [grid for f in _moved(walk, node, result) if (grid := _as_grid(walk, node, f, fixed)) is not None]


def _shuffle(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """Pixel and channel shuffles: channels that end in one channel, or at one place of its groups, go together."""
    module = walk.layers.get(node.target) if node.op == "call_module" else None
    groups = getattr(module, "groups", None) or (node.args[1] if node.target is F.channel_shuffle else None)
    if groups:
        for field in walk.fields[_source(node)]:
            if 1 in varying(field):
                walk.atoms.tie(field.unflatten(1, (groups, -1)), 1, f"meets a tensor of fixed size in {node.name}")
    reason = f"meets a tensor of fixed size in {node.name}"
    tied = []
    for field in _moved(walk, node, result):
        for dim in sorted(varying(field) - {result.dim() - 3}):
            field = walk.atoms.tie(field, dim, reason)
        tied.append(walk.atoms.compact(field))
    return tied


def _split(walk: Walk, node: fx.Node, result: Sequence[Tensor]) -> Fields:
    """chunk, and split at sizes made from the width: neurons at the same place of each part go together."""
    source, arguments = _source(node), node.args[1:]
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
    return _moved(walk, node, result)


def _unbind(walk: Walk, node: fx.Node, result: Sequence[Tensor]) -> Fields:
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    _blocked_along(walk, node, [dim])
    return _moved(walk, node, result)


def _glu(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """The halves of a dimension are multiplied: neurons at the same place of both go together."""
    dim = walk.layers[node.target].dim if node.op == "call_module" else node.kwargs.get("dim", (*node.args, -1)[1])
    dim = dim % result.dim()
    kept = []
    for field in walk.fields[_source(node)]:
        if dim in varying(field):
            first, second = field.chunk(2, dim)
            field = walk.atoms.compact(walk.atoms.unite(first, second, f"meets a tensor of fixed size in {node.name}"))
        kept.append(field)
    return kept


def _blocked_along(walk: Walk, node: fx.Node, dims: Sequence[int] | None) -> list[Tensor]:
    """The source's fields that do not vary along ``dims`` (None: any); the others are blocked."""
    source = _source(node)
    rank = walk.value(source).dim()
    worked = set(range(rank)) if dims is None else {dim % rank for dim in dims}
    inside = [field for field in walk.fields[source] if varying(field) & worked]
    what = type(walk.layers[node.target]).__name__ if node.op == "call_module" else node.name
    walk.atoms.block(inside, f"{what} works over its neurons")
    return [field for field in walk.fields[source] if not varying(field) & worked]


def _dims(walk: Walk, node: fx.Node) -> list[int] | None:
    """The dimensions an operation was told to work over; None: all."""
    if node.op == "call_module":
        dim = walk.layers[node.target].dim
    else:
        dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else None))
    if isinstance(dim, int) and not isinstance(dim, bool):
        return [dim]
    return list(dim) if isinstance(dim, tuple | list) and all(isinstance(d, int) for d in dim) else None


def _over(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """softmax and its like: work over dimensions that stay."""
    return _blocked_along(walk, node, _dims(walk, node))


def _normalize(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    return _blocked_along(walk, node, [node.kwargs.get("dim", (*node.args, 2.0, 1)[2] if len(node.args) > 2 else 1)])


def _reduced(walk: Walk, node: fx.Node, result) -> Fields | None:
    """mean, sum, amax …: work over dimensions that go."""
    dims, rank = _dims(walk, node), walk.value(_source(node)).dim()
    fields = _blocked_along(walk, node, dims)
    if dims is None:
        return None
    first = result if isinstance(result, Tensor) else result[0]
    if first.dim() != rank:
        fields = [field.squeeze([dim % rank for dim in dims]) for field in fields]
    return fields if isinstance(result, Tensor) else tuple(fields for _ in result)


def _pool(walk: Walk, node: fx.Node, result) -> Fields | None:
    if not isinstance(result, Tensor):
        return _unknown(walk, node, result)
    what = type(walk.layers[node.target]).__name__ if node.op == "call_module" else node.target.__name__
    return _blocked_along(walk, node, list(range(result.dim() - int(what[-2]), result.dim())))


def _resized(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    """Upsampling works over every dimension behind the channels."""
    return _blocked_along(walk, node, list(range(2, result.dim())))


def _padded(walk: Walk, node: fx.Node, result: Tensor) -> Fields:
    old = walk.value(_source(node)).shape
    return _blocked_along(walk, node, [dim for dim in range(result.dim()) if result.shape[dim] != old[dim]])


ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Hardshrink, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Tanhshrink,
    nn.Threshold, nn.RReLU, nn.Identity, nn.PReLU,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    F.softplus, F.softsign, F.tanh, F.sigmoid, F.logsigmoid, F.threshold,
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.log, torch.abs, torch.neg, torch.square, torch.sqrt, torch.rsqrt,
    torch.sin, torch.cos, torch.erf, torch.clamp, torch.where, torch.pow,
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.lerp,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.iadd, operator.isub, operator.imul,
    operator.itruediv, operator.pow, operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne,
    "relu", "relu_", "tanh", "sigmoid", "exp", "log", "abs", "neg", "square", "sqrt", "rsqrt", "sin", "cos", "erf",
    "clamp", "clamp_", "pow", "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "maximum", "minimum",
    "masked_fill", "where", "gt", "ge", "lt", "le", "eq", "ne",
    "contiguous", "clone", "detach", "to", "type_as", "float", "half", "double", "bfloat16", "type",
)  # fmt: skip
POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.lp_pool1d, F.lp_pool2d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
)  # fmt: skip
MOVES = (
    nn.Flatten, torch.flatten, "flatten", torch.permute, "permute", torch.transpose, "transpose", torch.swapaxes, "swapaxes",
    torch.movedim, "movedim", torch.t, "t", torch.unsqueeze, "unsqueeze", "expand", "expand_as", torch.flip, "flip",
    torch.roll, "roll", "repeat", torch.tile, "tile", torch.repeat_interleave, "repeat_interleave", torch.narrow, "narrow",
    torch.select, "select",
)  # fmt: skip
REDUCTIONS = (
    torch.mean, torch.sum, torch.amax, torch.amin, torch.max, torch.min, torch.var, torch.std, torch.logsumexp, torch.prod,
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp", "prod",
)  # fmt: skip
RULES: dict[object, Callable] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(POOLS, _pool),
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, F.softmax, F.log_softmax, torch.softmax, "softmax", "log_softmax",
                     torch.log_softmax, torch.cumsum, "cumsum"), _over),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate), _resized),
    **dict.fromkeys((F.pad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
                     nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
                     nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.CircularPad1d, nn.CircularPad2d), _padded),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, F.pixel_shuffle, F.pixel_unshuffle,
                     F.channel_shuffle), _shuffle),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), _cat),
    **dict.fromkeys((torch.chunk, "chunk", torch.split, "split", torch.tensor_split, "tensor_split"), _split),
    **dict.fromkeys((torch.unbind, "unbind"), _unbind),
    **dict.fromkeys((torch.squeeze, "squeeze"), _squeeze),
    **dict.fromkeys((nn.GLU, F.glu), _glu),
    **dict.fromkeys((nn.Unflatten, torch.unflatten, "unflatten"), _unflatten),
    **dict.fromkeys(("view", "reshape", torch.reshape), _reshape),
    **dict.fromkeys((torch.matmul, "matmul", operator.matmul, torch.bmm, "bmm"), _matmul),
    **dict.fromkeys((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerDecoder,
                     nn.Transformer), _transformer),
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    F.normalize: _normalize,
    "size": _size,
    "dim": _number,
    "numel": _size,
    getattr: _size_attribute,
    operator.getitem: _getitem,
}  # fmt: skip
FOREIGN: dict[str, Callable] = {  # functions of packages that the method does not import
    "torchvision.ops.stochastic_depth.stochastic_depth": _elementwise,
}
