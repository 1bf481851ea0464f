"""Weights that lie side by side in one memory block, so that one wider product can read them without a copy.

`lay_side_by_side(model)` puts the weights of neighbouring linear layers there: of q, k and v, of gate and up. Every
weight stays a parameter of its own, whose changes in place the wider product sees, because there is no copy of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

ALIGNMENT = 16
"""Bytes to which every weight begins aligned."""


def lay_side_by_side(model: torch.nn.Module) -> int:
    """Move the weights of linear layers that stand next to each other in one module, with equal inputs and types, into
    one block for each such run; returns how many blocks were made.

    Values, parameters and memory in use stay the same; for a moment a block is held twice. Call it before
    torch.compile, and again after whatever moves parameters, such as `.to()`. Weights that others share, or that lie
    side by side already, are left alone.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    owners: dict[int, set[int]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            owners.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(tensor))
    made = 0
    for run in _runs(model):
        weights = [layer.weight for layer in run]
        alone = all(len(owners[weight.untyped_storage().data_ptr()]) == 1 for weight in weights)
        if alone and len({id(weight) for weight in weights}) == len(weights):
            _lay(weights)
            made += 1
    return made


def beside(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether matrices [K, N] with unit stride along K lie one after the other in one storage; fake ones will do."""
    first = tensors[0]
    place = first.storage_offset()
    for tensor in tensors:
        rows, columns = tensor.shape
        same = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata and tensor.dtype == first.dtype
        if not same or rows != first.shape[0] or tensor.stride() != (1, rows) or tensor.storage_offset() != place:
            return False
        place += rows * columns
    return True


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices [K, N] as one [K, sum of N], unit stride along K: a view where they lie side by side, else a copy."""
    if beside(tensors):
        rows, columns = tensors[0].shape[0], sum(tensor.shape[1] for tensor in tensors)
        return tensors[0].as_strided((rows, columns), (1, rows))
    return torch.cat([tensor.t() for tensor in tensors]).t()


def _runs(model: torch.nn.Module) -> Iterator[list[torch.nn.Linear]]:
    """Linear layers of one module, next to each other, that one wider layer could stand for."""
    for parent in model.modules():
        layers = [child for child in parent.children() if type(child) is torch.nn.Linear and _is_plain(child)]
        for _, run in itertools.groupby(layers, key=_kind):
            found = list(run)
            if len(found) > 1:
                yield found


def _kind(layer: torch.nn.Linear) -> tuple[object, ...]:
    weight = layer.weight
    return layer.in_features, weight.dtype, weight.device, layer.bias is None, weight.requires_grad


def _is_plain(layer: torch.nn.Linear) -> bool:
    weight = layer.weight
    aligned = weight.shape[0] * weight.shape[1] * weight.element_size() % ALIGNMENT == 0
    return type(weight) is torch.nn.Parameter and weight.device.type != "meta" and weight.is_contiguous() and aligned


def _lay(weights: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        block = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, block.split([weight.shape[0] for weight in weights]), strict=True):
            weight.data = part
