"""ConvNeXt-B by timm with two, two, four and two blocks in its stages: 32 images of 224 x 224, channels last.
`convnext.py:training` is a training step."""

from __future__ import annotations

import torch
from model_parts import Classified, Made, built, evaluated, images, labels, library, when_asked
from torch import nn

BLOCKS, IMAGES, SIDE, CLASSES = (2, 2, 4, 2), 32, 224, 1000


def _built() -> nn.Module:
    # a block's branch begins at a millionth of its size in timm, where no error of it would be seen
    scale = {"depths": BLOCKS, "ls_init_value": 1.0}
    model = built(lambda: library("timm").create_model("convnext_base", **scale))
    return model.to(memory_format=torch.channels_last)


def inference() -> Made:
    """Scores of classes."""
    return evaluated(_built()), (images(IMAGES, SIDE),)


def training() -> Made:
    """The loss."""
    return Classified(_built()).train(), (images(IMAGES, SIDE), labels(IMAGES, CLASSES))


__getattr__ = when_asked(globals(), inference)
