"""Kernelwright: the fastest correct kernel for an operator, a shape and a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"


def compile(
    model: Callable[..., Any], *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """torch.compile(model, backend="kernelwright") with these options of ours and of Inductor's (docs/compile.md)."""
    import torch

    compiled: Callable[..., Any] = torch.compile(
        model, backend="kernelwright", fullgraph=fullgraph, dynamic=dynamic, options=options
    )
    return compiled
