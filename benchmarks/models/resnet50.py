"""ResNet-50 in plain torch, evaluated: 32 images of 224 x 224, channels last, bf16. Weights and statistics are random.

Without a GPU the model lies on the meta device, where it can be explained but not run. `resnet50.py:training` is a
training step, where batch norms use the batch's own statistics.
"""

from __future__ import annotations

import torch
from model_parts import PLACE, Classified, Made, evaluated, images, labels, when_asked
from torch import Tensor, nn
from torch.nn import functional

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Inner channels, blocks and first stride of each stage."""

EXPANSION = 4
IMAGES, SIDE, CLASSES = 32, 224, 1000


def _convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False, **PLACE)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(channels_out, **PLACE))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 around a residual."""

    def __init__(self, channels_in: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = inner * EXPANSION
        self.first = _convolution(channels_in, inner, 1)
        self.second = _convolution(inner, inner, 3, stride)
        self.third = _convolution(inner, outer, 1)
        short = channels_in == outer and stride == 1
        self.residual = nn.Identity() if short else _convolution(channels_in, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, channels_in, H, W]."""
        y = functional.relu(self.second(functional.relu(self.first(x))))
        return functional.relu(self.third(y) + self.residual(x))


class ResNet50(nn.Module):
    """Images [N, 3, H, W] to scores [N, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolution(3, 64, 7, 2)
        blocks, channels = [], 64
        for inner, count, stride in STAGES:
            for place in range(count):
                blocks.append(Bottleneck(channels, inner, stride if place == 0 else 1))
                channels = inner * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, CLASSES, **PLACE)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W]."""
        x = functional.max_pool2d(functional.relu(self.stem(x)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def _built() -> ResNet50:
    torch.manual_seed(0)
    built = ResNet50()
    for module in built.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            # the sum of sixteen residual branches stays small
            nn.init.constant_(module.weight, 0.5)
    return built.to(memory_format=torch.channels_last)


def training() -> Made:
    """The loss, with the batch's own statistics in batch norms."""
    return Classified(_built()).train(), (images(IMAGES, SIDE), labels(IMAGES, CLASSES))


def inference() -> Made:
    """Scores of classes."""
    return evaluated(_built()), (images(IMAGES, SIDE),)


__getattr__ = when_asked(globals(), inference)
