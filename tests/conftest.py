"""What every test runs in: caches and data folders of its own, and uninitialised CPU tensors filled with NaN."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# What is collected stays until the end: looking through it for garbage again and again would take a third of the time.
gc.disable()

# Triton decides when a kernel is defined whether it is interpreted, so these tests need a process of their own.
collect_ignore = [] if INTERPRETED else ["interpreter"]


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing a test does reaches the user's database, caches or settings, and child processes do not import from
    the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("KERNELWRIGHT_")]:
            patch.delenv(name)
        folders = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_DATA_HOME", "XDG_CACHE_HOME")
        for folder in folders:
            patch.setenv(folder, str(tmp_path_factory.mktemp(folder.lower())))
        patch.setenv("PYTHONSAFEPATH", "1")
        # one process more, which imports all of torch, is more than two cores can make good
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


def pytest_collection_finish() -> None:
    """Poison torch for the whole run once a collected test has imported it: a kernel that leaves part of its output
    unwritten then gives NaN rather than what lay in memory."""
    gc.freeze()
    # what is frozen does not count, so that what a test keeps (a tree of every file, say) would be looked through often
    gc.set_threshold(50_000, 20)
    gc.enable()
    if "torch" in sys.modules:
        import torch
        from torch.utils._device import _device_constructors

        # `with torch.device(..)` goes by the functions that it finds at its first use; the wrappers are none of them
        _device_constructors()
        for name in ("empty", "empty_like", "empty_strided"):
            setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def filled(*args: Any, **kwargs: Any) -> Any:
        tensor = create(*args, **kwargs)
        if tensor.device.type == "cpu" and tensor.dtype.is_floating_point:
            tensor.detach().fill_(float("nan"))
        return tensor

    return filled
