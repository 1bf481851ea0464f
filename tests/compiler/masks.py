"""Masks of attention that the tests of both passes over them make, [.., LENGTH, LENGTH]."""

from __future__ import annotations

import torch

LENGTH = 24


def additive() -> torch.Tensor:
    hidden = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.zeros(LENGTH, LENGTH).masked_fill(hidden, float("-inf"))


def windowed() -> torch.Tensor:
    places = torch.arange(LENGTH)
    return (places[None, :] <= places[:, None]) & (places[None, :] > places[:, None] - 5)


def with_a_held_number() -> torch.Tensor:
    """As transformers makes additive ones."""
    places = torch.arange(LENGTH)
    seen = places[None, None, None, :] <= places[None, None, :, None]
    least = torch.finfo(torch.float32).min
    return torch.where(seen, torch.tensor(0.0, dtype=torch.float32), least).expand(2, 1, LENGTH, LENGTH)
