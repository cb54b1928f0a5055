"""Convolutional networks: the tutorial's, LeNet-5 in Caffe's form, VGG-11 and ResNet-20 in their CIFAR forms."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from .errors import ModelError

VGG11 = (64, 128, 256, 256, 512, 512, 512, 512)  # configuration A: channels of each convolution
POOLED_AFTER = (1, 2, 4, 6, 8)  # the convolutions, counted from 1, that a pooling follows


class TutorialCNN(nn.Module):
    """The CIFAR-10 tutorial's network: two unpadded 5×5 convolutions with pooling, then fc1, fc2, fc3 of 250, 200, classes."""

    def __init__(self, shape: Sequence[int], classes: int):
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.act = nn.ReLU()
        features = 16 * _features_left("tutorial_cnn", height, width)
        self.fc1 = nn.Linear(features, 250)
        self.fc2 = nn.Linear(250, 200)
        self.fc3 = nn.Linear(200, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → class scores [B, classes]."""
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        x = self.act(self.fc1(x.flatten(1)))
        return self.fc3(self.act(self.fc2(x)))


class LeNet5(nn.Module):
    """Two unpadded 5×5 convolutions of 20 and 50 channels, each max pooled, then fc1 and fc2 of 500, classes; one ReLU, after fc1."""

    def __init__(self, shape: Sequence[int], classes: int):
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.act = nn.ReLU()
        self.fc1 = nn.Linear(50 * _features_left("lenet_5", height, width), 500)
        self.fc2 = nn.Linear(500, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → class scores [B, classes]."""
        x = self.pool(self.conv2(self.pool(self.conv1(x))))
        return self.fc2(self.act(self.fc1(x.flatten(1))))


def _features_left(name: str, height: int, width: int) -> int:
    """Pixels of a channel after two unpadded 5×5 convolutions, each pooled by 2."""
    left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    if min(left) < 1:
        side = min(height, width)
        raise ModelError(f"{name} needs images of at least 16×16 pixels, got a side of {side}: use model=mlp")
    return left[0] * left[1]


class VGG(nn.Module):
    """3×3 convolutions with BatchNorm and ReLU, max pooling in between, one Linear on globally pooled features."""

    def __init__(self, shape: Sequence[int], classes: int, widths: Sequence[int]):
        super().__init__()
        channels, *sides = shape
        side = min(sides)
        self.features = nn.Sequential()
        for i, (before, after) in enumerate(zip([channels, *widths], widths, strict=False), start=1):
            self.features.add_module(f"conv{i}", nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.features.add_module(f"bn{i}", nn.BatchNorm2d(after))
            self.features.add_module(f"act{i}", nn.ReLU())
            if i in POOLED_AFTER and side > 1:  # small images are one pixel early: nothing is left to pool
                self.features.add_module(f"pool{i}", nn.MaxPool2d(2))
                side //= 2
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → class scores [B, classes]."""
        return self.fc(self.pool(self.features(x)).flatten(1))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.add_module("conv", nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.add_module("bn", nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] → [B, outputs, H / stride, W / stride]."""
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return self.act(y + self.shortcut(x))


class ResNet(nn.Module):
    """He et al. 2016, CIFAR form: a 3×3 convolution, three stages of basic blocks, one Linear on globally pooled features."""

    def __init__(self, channels: int, classes: int, blocks: int, width: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.act = nn.ReLU()
        self.stages = nn.Sequential()
        inputs = width
        for stage in (1, 2, 3):
            outputs = width * 2 ** (stage - 1)
            strides = [1 if stage == 1 else 2] + [1] * (blocks - 1)
            inside = OrderedDict()
            for i, stride in enumerate(strides, start=1):
                inside[f"block{i}"] = BasicBlock(inputs, outputs, stride)
                inputs = outputs
            self.stages.add_module(f"stage{stage}", nn.Sequential(inside))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → class scores [B, classes]."""
        x = self.act(self.bn(self.conv(x)))
        return self.fc(self.pool(self.stages(x)).flatten(1))


def tutorial_cnn(shape: Sequence[int], classes: int) -> TutorialCNN:
    """The public demo's network (PyTorch's CIFAR-10 tutorial with wider linear layers)."""
    return TutorialCNN(shape, classes)


def lenet_5(shape: Sequence[int], classes: int) -> LeNet5:
    """LeNet-5 as Caffe's MNIST example has it, and with it most papers on pruning: 20-50-800-500 on MNIST, 800 being 50 · 4 · 4.

    LeCun et al. 1998 have other widths, trained subsampling and tanh.
    """
    return LeNet5(shape, classes)


def vgg11_bn(shape: Sequence[int], classes: int, width: float = 1.0) -> VGG:
    """VGG-11 with BatchNorm (Simonyan and Zisserman 2015, configuration A), CIFAR form; ``width`` multiplies all channels.

    The convolutions have no bias: the BatchNorm behind each has one. Images of any size do; a side is pooled down to 1 at most.
    """
    return VGG(shape, classes, [max(1, round(width * channels)) for channels in VGG11])


def resnet20(shape: Sequence[int], classes: int, width: int = 16) -> ResNet:
    """ResNet-20 for CIFAR (He et al. 2016): three stages of three blocks with ``width``, 2 ``width``, 4 ``width`` channels.

    Shortcuts that change the shape are 1×1 convolutions with BatchNorm (option B of the paper). Its option A, used there
    on CIFAR, pads with channels of zeros by their position: such a shortcut can't lose channels.
    """
    return ResNet(shape[0], classes, blocks=3, width=width)
