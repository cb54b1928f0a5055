"""A small vision transformer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .errors import ModelError

# Shapes: B batch, T tokens (patches), D dim.


class TransformerBlock(nn.Module):
    """Attention, then two Linear layers, each normalised before and added to what came in (pre-norm)."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        y = self.norm1(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm2(x)))))


class ViT(nn.Module):
    """A patch embedding, learned positions, blocks, and one Linear on the mean over all tokens.

    No step looks at a size: torch.fx can trace it, and it stays right when layers shrink.
    """

    def __init__(self, channels: int, tokens: int, classes: int, patch_size: int, dim: int, depth: int, heads: int,
                 hidden: int, dropout: float):  # fmt: skip
        super().__init__()
        self.embed = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty(1, tokens, dim))
        nn.init.trunc_normal_(self.positions, std=0.02)
        blocks = {f"block{i}": TransformerBlock(dim, heads, hidden, dropout) for i in range(1, depth + 1)}
        self.blocks = nn.Sequential(OrderedDict(blocks))
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → class scores [B, classes]."""
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x + self.positions))
        return self.fc(x.mean(1))


def vit_tiny(shape: Sequence[int], classes: int, patch_size: int = 4, dim: int = 192, depth: int = 6, heads: int = 3,
             mlp_ratio: float = 4.0, dropout: float = 0.0) -> ViT:  # fmt: skip
    """A vision transformer (Dosovitskiy et al. 2021) for small images: the widths of ViT-Tiny, half its depth.

    The mean over tokens stands for the class token of the paper. ``mlp_ratio``: hidden neurons of a block, per ``dim``.
    """
    channels, height, width = shape
    if height % patch_size or width % patch_size:
        raise ModelError(
            f"model.patch_size={patch_size} does not divide images of {height}×{width} pixels: "
            f"choose one of {', '.join(map(str, _divisors(height, width)))}"
        )
    if dim % heads:
        raise ModelError(f"model.dim={dim} is no multiple of model.heads={heads}: every head has an equal share of it")
    tokens = (height // patch_size) * (width // patch_size)
    return ViT(channels, tokens, classes, patch_size, dim, depth, heads, max(1, round(mlp_ratio * dim)), dropout)


def _divisors(height: int, width: int) -> list[int]:
    return [size for size in range(1, min(height, width) + 1) if height % size == width % size == 0]
