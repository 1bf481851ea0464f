"""Tensors, shared memory, copies and products of a simulated multiprocessor, as attention in Gluon sees them."""

from __future__ import annotations

import threading
import types
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.simulated_warps import Barrier, Machine

Array = npt.NDArray[Any]


class Tensor(np.ndarray[Any, Any]):
    """A tensor in registers; layouts say nothing here."""

    @property
    def type(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Tensor:
        return self.astype(dtype)


def tensor(x: Any) -> Tensor:
    return np.asarray(x).view(Tensor)


class Pointer:
    """A pointer, or a tensor of pointers, into a result of which each element may be written once."""

    dtype = types.SimpleNamespace(element_ty=np.float64)

    def __init__(self, memory: Array, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def store(self, value: Array, mask: Array) -> None:
        places, wide, inside = np.broadcast_arrays(self.offset, value, mask)
        flat = self.memory.reshape(-1)
        assert np.isnan(flat[places[inside]]).all(), "an element was written twice"
        flat[places[inside]] = wide[inside]


class View:
    """One tile in shared memory."""

    def __init__(self, memory: Array, turned: bool = False) -> None:
        self.memory, self.turned = memory, turned

    def index(self, slot: int) -> View:
        assert 0 <= slot < len(self.memory), "a slot outside of the ring"
        return View(self.memory[slot])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    def reshape(self, shape: tuple[int, int]) -> View:
        return View(self.memory.reshape(shape))

    def permute(self, order: tuple[int, int]) -> View:
        return View(self.memory, True)

    def slice(self, start: int, length: int) -> View:
        assert 0 <= start <= start + length <= len(self.memory), "a part outside of the tile"
        return View(self.memory[start : start + length])

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> View:
        return View(self.memory.reshape(-1)[: np.prod(shape)].reshape(shape))

    def store(self, x: Array) -> None:
        self.memory[:] = x

    def load(self, layout: Any) -> Tensor:
        return tensor(self.memory.copy())

    def read(self) -> Array:
        return self.memory.T if self.turned else self.memory


class Flying:
    """A product in flight reads shared memory until it ends, and fails if that has changed since it began."""

    def __init__(self, a: Any, b: View, acc: Any, use_acc: bool) -> None:
        self.views = [(x, x.read().copy()) for x in (a, b) if isinstance(x, View)]
        left = a.read() if isinstance(a, View) else a
        start = acc.value if isinstance(acc, Flying) else acc
        self.value = tensor((start if use_acc else 0) + left @ b.read())
        self.type, self.done = types.SimpleNamespace(layout=None), False

    def finish(self) -> None:
        for view, then in self.views:
            assert np.array_equal(view.read(), then, equal_nan=True), "shared memory changed while it was read"
        self.done = True


class Descriptor:
    """A tensor [B, H, S, D] that is read and written in boxes; what lies outside reads as zeros and is not written."""

    dtype, layout = np.float64, None

    def __init__(self, whole: Array, width: int) -> None:
        self.whole, self.width = whole, width

    def read(self, place: list[int], rows: int) -> Array:
        batch, head, row, column = map(int, place)
        part = self.whole[batch, head, row : row + rows, column : column + self.width]
        box = np.zeros((1, 1, rows, self.width))
        box[0, 0, : part.shape[0], : part.shape[1]] = part
        return box

    def write(self, place: list[int], box: Array) -> None:
        batch, head, row, column = map(int, place)
        part = self.whole[batch, head, row : row + box.shape[2], column : column + self.width]
        assert np.isnan(part).all(), "a tile was written twice"
        part[:] = box[0, 0, : part.shape[0], : part.shape[1]]


def copies(machine: Machine) -> dict[str, Any]:
    """The copy engine: copies land when they will, and a reader that must not be too early waits for them."""
    saving: list[Any] = []

    def load(source: Descriptor, place: list[int], barrier: Barrier, slot: View) -> None:
        machine.pause()
        box = source.read(place, slot.shape[2])

        def land() -> None:
            slot.store(box)
            barrier.bytes -= box.size * 2
            barrier.settle()

        machine.copies.append(land)

    def save(target: Descriptor, place: list[int], source: View) -> None:
        machine.pause()
        then, key = source.read().copy(), object()
        saving.append(key)

        def land() -> None:
            assert np.array_equal(source.read(), then), "a result was overwritten before it was saved"
            target.write(place, then)
            saving.remove(key)

        machine.copies.append(land)

    store = types.SimpleNamespace(store_wait=lambda left: machine.pause(lambda: not saving))
    return {"fa_load": load, "fa_save": save, "tma": store}


def products(machine: Machine) -> dict[str, Any]:
    """The tensor cores: products of one partition end in order."""
    flying: dict[int, list[Flying]] = {}

    def multiply(a: Any, b: View, acc: Any, use_acc: bool = True, is_async: bool = False) -> Flying:
        machine.pause()
        product = Flying(a, b, acc, use_acc)
        flying.setdefault(machine_thread(), []).append(product)
        return product

    def settle(left: int, deps: tuple[Flying, ...]) -> Any:
        machine.pause()
        mine = flying[machine_thread()]
        while len(mine) > left:
            mine.pop(0).finish()
        assert all(x.done for x in deps), "a product is used before it has ended"
        return deps[0].value if len(deps) == 1 else tuple(x.value for x in deps)

    return {"warpgroup_mma": multiply, "warpgroup_mma_wait": settle}


def machine_thread() -> int:
    """Which partition runs."""
    return threading.get_ident()


def language(program: int, programs: int) -> types.SimpleNamespace:
    """The parts of Gluon that have no side effects."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return types.SimpleNamespace(
        SwizzledSharedLayout=nothing,
        program_id=lambda axis: tensor(program), num_programs=lambda axis: programs, static_range=range,
        cdiv=lambda x, y: -(-x // y), minimum=lambda x, y: tensor(np.minimum(x, y)),
        maximum=lambda x, y: tensor(np.maximum(x, y)), where=lambda c, x, y: tensor(np.where(c, x, y)),
        exp2=np.exp2, log2=np.log2, max=lambda x, axis: x.max(axis), sum=lambda x, axis: x.sum(axis),
        zeros=lambda shape, dtype, layout: tensor(np.zeros(shape)),
        full=lambda shape, value, dtype, layout: tensor(np.full(shape, value)),
        arange=lambda start, end, layout: tensor(np.arange(start, end)), convert_layout=lambda x, layout: x,
        store=lambda pointer, value, mask: pointer.store(value, mask), float32=np.float64, int64=np.int64,
        int32=np.int64, SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
    )  # fmt: skip
