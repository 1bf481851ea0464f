"""MobileNetV3-large by timm: 64 images of 224 x 224, channels last. `mobilenet.py:training` is a training step."""

from __future__ import annotations

import torch
from model_parts import Classified, Made, built, evaluated, images, labels, library, when_asked
from torch import nn

IMAGES, SIDE, CLASSES = 64, 224, 1000


def _built() -> nn.Module:
    model = built(lambda: library("timm").create_model("mobilenetv3_large_100"))
    return model.to(memory_format=torch.channels_last)


def inference() -> Made:
    """Scores of classes."""
    return evaluated(_built()), (images(IMAGES, SIDE),)


def training() -> Made:
    """The loss, with the batch's own statistics in batch norms."""
    return Classified(_built()).train(), (images(IMAGES, SIDE), labels(IMAGES, CLASSES))


__getattr__ = when_asked(globals(), inference)
