"""Triton's interpreter as it is, without what it works out again and again: that takes about half of its time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton 3.6 turns NumPy arrays of one number into numbers as NumPy no longer wants it."""
    if triton.__version__.startswith("3.6."):
        for item in items:
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))


@functools.cache
def builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """At each call of a function inside a kernel; only what was a builtin at first can be one."""
    for name in builtins_of(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


np_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


def np_dtype(dtype: Any) -> Any:
    """At each operation; types of blocks and pointers cannot be keys."""
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else np_dtype_of_scalar(scalar)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        # it computes of each sum and product whether it overflows, and then tells nobody: that takes options.debug
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
