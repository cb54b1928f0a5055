"""Multilayer perceptrons: flat features, Linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


class MLP(nn.Module):
    """Flatten, then Linear layers fc1 … fcK, each hidden one followed by [BatchNorm1d], activation, [Dropout]."""

    def __init__(
        self, inputs: int, classes: int, widths: Sequence[int], activation: str, batch_norm: bool, dropout: float
    ):
        super().__init__()
        self.depth = len(widths)
        sizes = [inputs, *widths, classes]
        for i in range(1, len(sizes)):
            self.add_module(f"fc{i}", nn.Linear(sizes[i - 1], sizes[i]))
        for i, width in enumerate(widths, start=1):
            self.add_module(f"bn{i}", nn.BatchNorm1d(width) if batch_norm else nn.Identity())
            self.add_module(f"act{i}", ACTIVATIONS[activation]())
            self.add_module(f"drop{i}", nn.Dropout(dropout) if dropout else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → class scores [B, classes]."""
        x = x.flatten(1)
        for i in range(1, self.depth + 1):
            for name in ("fc", "bn", "act", "drop"):
                x = getattr(self, f"{name}{i}")(x)
        return getattr(self, f"fc{self.depth + 1}")(x)


def mlp(shape: Sequence[int], classes: int, widths: Sequence[int] = (256, 128), activation: str = "relu",
        batch_norm: bool = False, dropout: float = 0.0) -> MLP:  # fmt: skip
    """A multilayer perceptron on flattened images of ``shape`` (C, H, W)."""
    channels, height, width = shape
    return MLP(channels * height * width, classes, widths, activation, batch_norm, dropout)


def lenet_300_100(shape: Sequence[int], classes: int, activation: str = "relu") -> MLP:
    """LeNet-300-100 (LeCun et al. 1998): two hidden layers of 300 and 100 neurons."""
    return mlp(shape, classes, widths=(300, 100), activation=activation)
