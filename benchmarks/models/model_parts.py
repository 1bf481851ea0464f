"""What the model files of this folder share: where tensors lie, libraries that may be missing, and losses.

Losses are written out, as torch's own lose their gradient where models without data are traced.

Models have random weights in bf16. Without a GPU they lie on the meta device, where they can be explained but not run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernelwright.errors import UsageError

DEVICE = "cuda" if torch.cuda.is_available() else "meta"
DTYPE = torch.bfloat16
PLACE: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE}

Made = tuple[nn.Module, tuple[Tensor, ...]]
"""A model and the inputs of a call."""


def library(name: str) -> Any:
    """A module of a library that only some models are built with, such as "transformers"; UsageError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"this model is built with {name.partition('.')[0]}, which must be installed: {error}"
        ) from error


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` gives, with random weights, where models lie and in their type."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return make().to(DTYPE)


def evaluated(model: nn.Module) -> nn.Module:
    """The model for inference."""
    return model.eval().requires_grad_(False)


def random(*sizes: int) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(*sizes, **PLACE)


def images(count: int, side: int) -> Tensor:
    """Random images [count, 3, side, side], channels last."""
    return random(count, 3, side, side).contiguous(memory_format=torch.channels_last)


def tokens(rows: int, length: int, kinds: int) -> Tensor:
    """Random int64 numbers [rows, length] below `kinds`."""
    return torch.randint(kinds, (rows, length), device=DEVICE)


def labels(rows: int, kinds: int) -> Tensor:
    """A random class for each of `rows`."""
    return torch.randint(kinds, (rows,), device=DEVICE)


class Output(nn.Module):
    """One tensor of what a model of transformers returns, given its first input by name."""

    def __init__(self, model: nn.Module, given: str, field: str, **options: Any) -> None:
        super().__init__()
        self.model, self.given, self.field, self.options = model, given, field, options

    def forward(self, x: Tensor) -> Tensor:
        """The field `field`."""
        found: Tensor = getattr(self.model(**{self.given: x}, **self.options), self.field)
        return found


class Classified(nn.Module):
    """The loss of a model whose last dimension are scores of classes, as a scalar in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Cross entropy; wanted [rows]: the right class of each row of scores."""
        scores = self.model(x).flatten(0, -2).float()
        return (scores.logsumexp(-1) - scores.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)).mean()


class Fitted(nn.Module):
    """The loss of a model that gives a tensor, as a scalar in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Mean squared difference from `wanted`."""
        return (self.model(x).float() - wanted.float()).square().mean()


def when_asked(names: dict[str, Any], make: Callable[[], Made]) -> Callable[[str], Any]:
    """A module's __getattr__ that builds `model` and `inputs` when one is asked for, so that naming another function of
    the file builds nothing twice. names: the module's globals."""

    def look_up(name: str) -> Any:
        if name not in ("model", "inputs"):
            raise AttributeError(name)
        names["model"], names["inputs"] = make()
        return names[name]

    return look_up


def configured(name: str, values: Mapping[str, Any]) -> Any:
    """A configuration of transformers by its class's name, without dropout and with fused attention."""
    return getattr(library("transformers"), name)(**values, attn_implementation="sdpa")
