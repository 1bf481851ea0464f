"""Six layers of ViT-L/16 by timm: 32 images of 224 x 224. `vit.py:training` is a training step."""

from __future__ import annotations

from model_parts import Classified, Made, built, evaluated, images, labels, library, when_asked
from torch import nn

LAYERS, IMAGES, SIDE, CLASSES = 6, 32, 224, 1000


def _built() -> nn.Module:
    return built(lambda: library("timm").create_model("vit_large_patch16_224", depth=LAYERS))


def inference() -> Made:
    """Scores of classes."""
    return evaluated(_built()), (images(IMAGES, SIDE),)


def training() -> Made:
    """The loss."""
    return Classified(_built()).train(), (images(IMAGES, SIDE), labels(IMAGES, CLASSES))


__getattr__ = when_asked(globals(), inference)
