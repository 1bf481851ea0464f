"""Compilers that the tests of one process share: to start one takes longer than most of what it compiles here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernelwright.kernels.build import BuildPool


@pytest.fixture(scope="session")
def pool(own_environment: None) -> Iterator[BuildPool]:
    """One compiler in a process of its own; what it has compiled once it takes from its cache."""
    with BuildPool(1, timeout_s=110.0) as pool:
        yield pool
