"""Uniform search: the base line that every other strategy must beat."""

from __future__ import annotations

import random

from kernelwright.kernels.space import Space
from kernelwright.search.exhaustive_search import InOrder
from kernelwright.types import Schedule


class RandomSearch(InOrder):
    """Every schedule of the space once, in an order drawn from the seed."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__()
        self._space = space
        self._rng = random.Random(seed)

    def _order(self) -> list[Schedule]:
        return self._space.sample(self._rng, len(self._space))
