"""Multi-head attention whose heads can be counted out: torch's own ties the width of all heads to that of its input.

Shapes: B batch, T queries, S keys, H heads, D features a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with any number of heads: the same parameters, arguments and results.

    A module becomes one in place (`become_explicit`). Unlike torch's, it calls its ``out_proj`` as a module, so that hooks
    see what the heads gave, and its in-projection may be narrower than its input.
    """

    def forward(
        self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True,
        is_causal=False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Like `nn.MultiheadAttention.forward`; ``is_causal`` is a hint about ``attn_mask`` there, and does nothing here."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which must be given")
        batched = query.dim() == 3
        batch = 0 if self.batch_first or not batched else 1
        query, key, value = (x.movedim(batch, 0) if batched else x.unsqueeze(0) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        mask = self._mask(q, attn_mask, key_padding_mask, batched)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.dropout((scores if mask is None else scores + mask.to(scores)).softmax(-1), dropout)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        return output.movedim(0, batch) if batched else output.squeeze(0), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q [B, H, T, D], k and v [B, H, S, D]."""
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights = self.in_proj_weight.chunk(3)
        projected = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected]

    def _mask(self, q: Tensor, attn_mask: Tensor | None, padding: Tensor | None, batched: bool) -> Tensor | None:
        """One mask to add to the scores [B, H, T, S], of the two that torch knows; True means masked out."""
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, self.num_heads)))
        if padding is not None:
            masks.append((padding if batched else padding.unsqueeze(0))[:, None, None])
        added = [
            torch.zeros_like(m, dtype=q.dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m for m in masks
        ]
        return sum(added) if added else None

    def fit(self) -> None:
        """Make the attributes say what the parameters are."""
        self.embed_dim = self.kdim = self.vdim = self.in_proj_weight.shape[1]
        self.num_heads = self.in_proj_weight.shape[0] // 3 // self.head_dim
        self._qkv_same_embed_dim = False  # keeps torch's fused encoder layers, which know one width only, away


def become_explicit(module: nn.Module) -> None:
    """Turn torch's own attention into `Attention`: the same object, parameters and hooks."""
    if type(module) is nn.MultiheadAttention:
        module.__class__ = Attention
        module._qkv_same_embed_dim = False


def leave_nesting(model: nn.Module) -> None:
    """Keep torch's encoders from handing their `Attention` nested tensors, as they do in eval mode where tokens are padded."""
    for encoder in _encoders(model):
        if any(type(module) is Attention for module in encoder.modules()):
            encoder.use_nested_tensor = False


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]


@contextmanager
def explicit_attention(model: nn.Module) -> Iterator[None]:
    """Inside, every attention of ``model`` shows what its heads give to its ``out_proj``."""
    turned = [m for m in model.modules() if type(m) is nn.MultiheadAttention and m._qkv_same_embed_dim]
    nesting = [(encoder, encoder.use_nested_tensor) for encoder in _encoders(model)]
    for module in turned:
        become_explicit(module)
    leave_nesting(model)
    try:
        yield
    finally:
        for module in turned:
            if module.in_proj_weight.shape[0] == 3 * module.in_proj_weight.shape[1]:  # not cut inside
                module.__class__ = nn.MultiheadAttention
                module._qkv_same_embed_dim = True
        for encoder, nests in nesting:
            encoder.use_nested_tensor = nests
        leave_nesting(model)
