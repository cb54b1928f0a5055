"""What each operation of a traced network does to the atoms of its inputs.

A rule takes (walk, node, result) and gives the fields of the result: a list for a tensor, a tuple of such for a tuple. Data movement
needs no rule of its own: the same operation moves the atoms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..layers import kind_of
from .base import nothing, unknown
from .elements import (
    elementwise,
    glu,
    matmul,
    normalize,
    over,
    padded,
    pool,
    reduced,
    resized,
    scaled_dot_product_attention,
)
from .layers import layer, transformer
from .moves import cat, moved, reshape, rolled, shuffle, split, squeeze, unbind, unflatten
from .sizes import getitem, number, size, size_attribute

if TYPE_CHECKING:
    from ..graph import Walk


def rule_of(walk: Walk, node: fx.Node) -> Callable:
    if node.op == "call_module":
        module = walk.layers[node.target]
        return layer if kind_of(module) is not None else RULES.get(type(module), unknown)
    if node.op == "call_function":
        name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"
        return RULES.get(node.target) or FOREIGN.get(name, unknown)
    if node.op == "call_method":
        return RULES.get(node.target, unknown)
    return {"output": output, "get_attr": attribute}.get(node.op, nothing)


def output(walk: Walk, node: fx.Node, result) -> None:
    walk.block_inputs(node, "is an output of the network")


def attribute(walk: Walk, node: fx.Node, result) -> None:
    walk.read_directly.append(node.target)


def follow_widths(walk: Walk, node: fx.Node, rule: Callable, result) -> None:
    """Numbers made from a width may become the sizes of a reshape; in any other computation they change its result."""
    if rule in (size, size_attribute, getitem):
        return
    sources = (walk.widths.get(source, {}) for source in node.all_input_nodes)
    counted = [field for widths in sources for fields in widths.values() for field in fields]
    if not counted or rule in (reshape, split, unflatten):
        return
    if (isinstance(result, int | float) and not isinstance(result, bool)) or (
        isinstance(result, tuple) and all(isinstance(size, int) for size in result)
    ):
        walk.widths[node] = {0: counted}
    else:
        walk.atoms.block(counted, f"its width enters a computation ({node.name})")


ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Hardshrink, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Tanhshrink,
    nn.Threshold, nn.RReLU, nn.Identity, nn.PReLU,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    F.softplus, F.softsign, F.tanh, F.sigmoid, F.logsigmoid, F.threshold,
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.log, torch.abs, torch.neg, torch.square, torch.sqrt, torch.rsqrt,
    torch.dropout, torch.feature_dropout, torch.selu, torch.celu, torch.rrelu, torch.threshold, torch.hardshrink,
    F.rrelu, F.hardshrink, F.softshrink, F.tanhshrink, F.feature_alpha_dropout,
    torch.sin, torch.cos, torch.erf, torch.clamp, torch.clip, torch.where, torch.pow, torch.log1p, torch.expm1,
    torch.reciprocal, torch.sign, torch.addcmul, torch.addcdiv, torch.ones_like, torch.zeros_like,
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.lerp,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.iadd, operator.isub, operator.imul,
    operator.itruediv, operator.pow, operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne,
    "relu", "relu_", "tanh", "sigmoid", "exp", "log", "abs", "neg", "square", "sqrt", "rsqrt", "sin", "cos", "erf",
    "clamp", "clamp_", "clip", "pow", "reciprocal", "sign", "addcmul", "addcdiv", "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "maximum", "minimum",
    "masked_fill", "where", "gt", "ge", "lt", "le", "eq", "ne",
    "contiguous", "clone", "detach", "to", "type_as", "float", "half", "double", "bfloat16", "type",
)  # fmt: skip
POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, torch.avg_pool1d, torch.adaptive_avg_pool1d,
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.lp_pool1d, F.lp_pool2d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
)  # fmt: skip
MOVES = (
    nn.Flatten, torch.flatten, "flatten", torch.permute, "permute", torch.transpose, "transpose", torch.swapaxes, "swapaxes",
    torch.movedim, "movedim", torch.t, "t", torch.unsqueeze, "unsqueeze", "expand", "expand_as", torch.flip, "flip",
    "repeat", torch.tile, "tile", torch.repeat_interleave, "repeat_interleave", torch.narrow, "narrow",
    torch.select, "select",
)  # fmt: skip
REDUCTIONS = (
    torch.mean, torch.sum, torch.amax, torch.amin, torch.max, torch.min, torch.var, torch.std, torch.logsumexp, torch.prod,
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp", "prod",
)  # fmt: skip
RULES: dict[object, Callable] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(POOLS, pool),
    **dict.fromkeys(MOVES, moved),
    **dict.fromkeys(REDUCTIONS, reduced),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, F.softmax, F.log_softmax, torch.softmax, "softmax", "log_softmax",
                     torch.log_softmax, torch.cumsum, "cumsum"), over),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate), resized),
    **dict.fromkeys((F.pad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
                     nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
                     nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.CircularPad1d, nn.CircularPad2d), padded),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, F.pixel_shuffle, F.pixel_unshuffle,
                     F.channel_shuffle), shuffle),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), cat),
    **dict.fromkeys((torch.chunk, "chunk", torch.split, "split", torch.tensor_split, "tensor_split"), split),
    **dict.fromkeys((torch.unbind, "unbind"), unbind),
    **dict.fromkeys((torch.squeeze, "squeeze"), squeeze),
    **dict.fromkeys((torch.roll, "roll"), rolled),
    **dict.fromkeys((nn.GLU, F.glu), glu),
    **dict.fromkeys((nn.Unflatten, torch.unflatten, "unflatten"), unflatten),
    **dict.fromkeys(("view", "reshape", torch.reshape), reshape),
    **dict.fromkeys((torch.matmul, "matmul", operator.matmul, torch.bmm, "bmm"), matmul),
    **dict.fromkeys((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerDecoder,
                     nn.Transformer), transformer),
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.normalize: normalize,
    "size": size,
    "dim": number,
    "numel": size,
    getattr: size_attribute,
    operator.getitem: getitem,
}  # fmt: skip
FOREIGN: dict[str, Callable] = {  # functions of packages that the method does not import
    "torchvision.ops.stochastic_depth.stochastic_depth": elementwise,
}
