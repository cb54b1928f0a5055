"""The model zoo: one builder per name, flat arguments; every model remembers how it was built.

``model.built_from`` holds the builder's name and arguments, so that a pruned model can be loaded from its file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class ModelError(ValueError):
    """A model that can't be built as asked."""


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


class TutorialCNN(nn.Module):
    """The CIFAR-10 tutorial's network: two unpadded 5×5 convolutions with pooling, then fc1, fc2, fc3 of 250, 200, classes."""

    def __init__(self, shape: Sequence[int], classes: int):
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.act = nn.ReLU()
        features = 16 * _after_two_convolutions(height) * _after_two_convolutions(width)
        self.fc1 = nn.Linear(features, 250)
        self.fc2 = nn.Linear(250, 200)
        self.fc3 = nn.Linear(200, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → class scores [B, classes]."""
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        x = self.act(self.fc1(x.flatten(1)))
        return self.fc3(self.act(self.fc2(x)))


def _after_two_convolutions(side: int) -> int:
    left = ((side - 4) // 2 - 4) // 2
    if left < 1:
        raise ModelError(f"tutorial_cnn needs images of at least 16×16 pixels, got a side of {side}: use model=mlp")
    return left


def mlp(shape: Sequence[int], classes: int, widths: Sequence[int] = (256, 128), activation: str = "relu",
        batch_norm: bool = False, dropout: float = 0.0) -> MLP:  # fmt: skip
    """A multilayer perceptron on flattened images of ``shape`` (C, H, W)."""
    channels, height, width = shape
    return MLP(channels * height * width, classes, widths, activation, batch_norm, dropout)


def lenet_300_100(shape: Sequence[int], classes: int, activation: str = "relu") -> MLP:
    """LeNet-300-100 (LeCun et al. 1998): two hidden layers of 300 and 100 neurons."""
    return mlp(shape, classes, widths=(300, 100), activation=activation)


def tutorial_cnn(shape: Sequence[int], classes: int) -> TutorialCNN:
    """The public demo's network (PyTorch's CIFAR-10 tutorial with wider linear layers)."""
    return TutorialCNN(shape, classes)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet_300_100": lenet_300_100,
    "tutorial_cnn": tutorial_cnn,
}


def build(name: str, *, shape: Sequence[int], classes: int, **arguments) -> nn.Module:
    """A new model for images of ``shape`` (C, H, W); ``arguments`` are those of the builder ``MODELS[name]``."""
    if name not in MODELS:
        raise ModelError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    model = MODELS[name](tuple(shape), classes, **arguments)
    model.built_from = {"name": name, "shape": list(shape), "classes": classes, **_plain(arguments)}
    return model


def _plain(arguments: dict) -> dict:
    return {key: list(value) if isinstance(value, tuple | list) else value for key, value in arguments.items()}
