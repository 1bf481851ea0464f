"""Simulated shared memory and accumulators of warp-specialised products, beside `simulated_warps`."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH = 64

Array = npt.NDArray[Any]


class Ring:
    """Shared memory as slots of `rows` lines of 128 bytes, or seen as tiles whose columns lie panel by panel."""

    dtype = types.SimpleNamespace(primitive_bitwidth=16)
    layout = None

    def __init__(self, memory: Array, shape: tuple[int, ...]) -> None:
        self.memory, self.shape = memory, shape

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Ring:
        return Ring(self.memory, tuple(shape))

    def index(self, slot: int) -> View:
        count, rows, columns = self.shape
        assert 0 <= slot < count, "a slot outside of the ring"
        panels = self.memory.reshape(count, columns // WIDTH, rows, WIDTH)[slot]
        return View(panels.transpose(1, 0, 2), (rows, columns))


class View:
    """One tile of a ring, which goes on living where it is."""

    def __init__(self, memory: Array, shape: tuple[int, int], turned: bool = False) -> None:
        self.memory, self.shape, self.turned = memory, shape, turned

    def permute(self, order: tuple[int, int]) -> View:
        return View(self.memory, self.shape, not self.turned)

    def load(self, layout: Any) -> Held:
        return Held(self.read().copy())

    def read(self) -> Array:
        tile = self.memory.reshape(self.shape)
        return tile.T if self.turned else tile


class Held:
    """A tile in registers."""

    def __init__(self, tile: Array) -> None:
        self.tile = tile

    def read(self) -> Array:
        return self.tile


class Accumulator:
    """Products in flight read shared memory when they end, and fail if it has changed since they began."""

    def __init__(self, rows: int, columns: int) -> None:
        self.value: Array = np.zeros((rows, columns))
        self.flying: list[tuple[View | Held, View, Array, Array, bool]] = []

    def multiply(self, x: View | Held, y: View, add: bool) -> None:
        self.flying.append((x, y, x.read().copy(), y.read().copy(), add))

    def finish(self, left: int) -> None:
        while len(self.flying) > left:
            x, y, x_then, y_then, add = self.flying.pop(0)
            assert np.array_equal(x.read(), x_then), "a was overwritten while it was read"
            assert np.array_equal(y.read(), y_then), "b was overwritten while it was read"
            self.value = (self.value if add else 0) + x_then @ y_then

    def __add__(self, other: Accumulator) -> Accumulator:
        assert not self.flying and not other.flying, "sums are read while products are in flight"
        total = Accumulator(*self.value.shape)
        total.value = self.value + other.value
        return total
