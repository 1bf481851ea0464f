"""Copies of matrices that the copy engine cannot read, by numbers."""

from __future__ import annotations

import pytest
import torch

from kernelwright.kernels.matmul.pack_kernel import packed, packed_transposed
from kernelwright.kernels.operator import launch_all

DTYPES = [torch.float16, torch.float32, torch.int8]


def a_matrix(rows: int, cols: int, pitch: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    storage = torch.randint(-100, 100, (offset + rows * pitch,)).to(dtype)
    return storage.as_strided((rows, cols), (pitch, 1), offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "cols", "pitch", "offset"),
    [(1, 1, 1, 0), (9, 33, 33, 0), (17, 1100, 1101, 1), (8, 64, 67, 3), (5, 7, 11, 2), (3, 2050, 2051, 5)],
)
def test_rows_of_any_alignment(dtype: torch.dtype, rows: int, cols: int, pitch: int, offset: int) -> None:
    matrix = a_matrix(rows, cols, pitch, offset, dtype)
    copy, launch = packed(matrix)
    launch_all([launch])
    assert torch.equal(copy, matrix)
    assert copy.stride(0) * copy.element_size() % 128 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols", "pitch"), [(1, 1, 1), (70, 65, 66), (130, 33, 40)])
def test_rows_become_columns(dtype: torch.dtype, rows: int, cols: int, pitch: int) -> None:
    matrix = a_matrix(rows, cols, pitch, 1, dtype)
    copy, launch = packed_transposed(matrix)
    launch_all([launch])
    assert torch.equal(copy, matrix.T)
    assert copy.stride(0) * copy.element_size() % 128 == 0
