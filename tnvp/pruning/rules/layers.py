"""Layers: what they read, carry and write."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from ..atoms import along, varying
from ..layers import (
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
from .base import Fields, fields_in, source_of, unknown

if TYPE_CHECKING:
    from ..graph import Walk


def layer(walk: Walk, node: fx.Node, result) -> Fields | None:
    name, module = node.target, walk.layers[node.target]
    kind = kind_of(module)
    if kind is ATTENTION:
        return attention(walk, node, result)
    source = source_of(node)
    for other in node.all_input_nodes:
        if other is not source or kind is EMBEDDING:
            walk.atoms.block(fields_in(walk.fields[other]), f"is read by {name} otherwise than as its input")
    if kind is EMBEDDING:
        return [along(walk.write(name, module.embedding_dim), result.dim() - 1, result.dim())]
    value = walk.value(source)
    if not isinstance(value, Tensor):
        return unknown(walk, node, result)
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


def attention(walk: Walk, node: fx.Node, result: tuple) -> Fields:
    """The embedding is read by the in-projection and written by the out-projection; the neurons between are whole heads."""
    name, module = node.target, walk.layers[node.target]
    inputs = dict(zip(("query", "key", "value"), node.args, strict=False)) | node.kwargs
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    for mask in node.all_input_nodes:
        if mask not in (query, key, value):
            walk.atoms.block(fields_in(walk.fields[mask]), f"is a mask of {name}")
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
    if result[1] is not None and any(_sees_weights(user) for user in node.users):
        walk.block_layer(name, f"the network uses the attention weights of {name}, which are those of all heads")
    embedding = walk.write(f"{name}.out_proj", module.out_proj.out_features)
    return ([along(embedding, result[0].dim() - 1, result[0].dim())], [])


def _sees_weights(user: fx.Node) -> bool:
    """Whether a user of an attention's result (output, weights) looks at more than the output."""
    return not (user.target is operator.getitem and (user.args[1] == 0 or not user.users))


def _heads(walk: Walk, name: str, module: nn.MultiheadAttention) -> None:
    """One neuron a head: its rows of the three in-projections, and its columns of the out-projection."""
    if name not in walk.written:
        features = walk.atoms.new(module.num_heads).repeat_interleave(module.head_dim)
        walk.written[name] = features.repeat(3)
        walk.read[f"{name}.out_proj"] = features


def transformer(walk: Walk, node: fx.Node, result) -> None:
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
