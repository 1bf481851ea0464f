"""Our operators run with the GPU of their operands as the current one, wherever the caller stands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def at_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the GPU of its first argument, a tensor or a list of them, as the current one."""

    @functools.wraps(function)
    def run(*operands: Any) -> Any:
        first = operands[0] if isinstance(operands[0], torch.Tensor) else operands[0][0]
        if first.get_device() == torch.cuda.current_device():
            return function(*operands)
        with torch.cuda.device(first.device):
            return function(*operands)

    return run
