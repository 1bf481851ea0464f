"""The GPUs as the driver tells them, with a driver that is made up."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.kernels import cuda_driver, device
from kernelwright.kernels.cuda_driver import DriverGpu, driver_gpus
from kernelwright.kernels.device import NAMED_DEVICES, gpu_count, gpu_uuid, present_device

UUID = "01020304-0506-0708-090a-0b0c0d0e0f10"


class FakeDriver:
    """Two H100s, as libcuda tells them. failing: a call that returns an error."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name == self.failing:
                return 100
            getattr(self, f"_{name}")(*args)
            return 0

        if not hasattr(type(self), f"_{name}"):
            raise AttributeError(name)
        return call

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = 2

    def _cuDeviceGet(self, handle: Any, index: int) -> None:
        handle._obj.value = 10 + index

    def _cuDeviceGetName(self, name: Any, length: int, handle: Any) -> None:
        assert length == len(name)
        name.value = f"NVIDIA H100 {handle.value}".encode()

    def _cuDeviceGetUuid_v2(self, number: Any, handle: Any) -> None:
        number.raw = bytes(range(1, 16)) + bytes([handle.value + 6])

    def _cuDeviceTotalMem_v2(self, memory: Any, handle: Any) -> None:
        memory._obj.value = NAMED_DEVICES["h100"].memory_bytes

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> None:
        value._obj.value = {16: 132, 75: 9, 76: 0}[attribute]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Put a driver in place, in a process that has not imported torch."""

    def put(driver: Any) -> None:
        def load(name: str) -> Any:
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("no such library")
            return driver

        driver_gpus.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", load)

    monkeypatch.setattr(cuda_driver, "_torch_has_cuda", lambda: True)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(device, "_torch", lambda: None)
    yield put
    driver_gpus.cache_clear()


def test_gpus_are_told_without_torch(install: Callable[[Any], None]) -> None:
    install(FakeDriver())
    memory = NAMED_DEVICES["h100"].memory_bytes
    assert driver_gpus() == (
        DriverGpu("NVIDIA H100 10", UUID, 9, 0, 132, memory),
        DriverGpu("NVIDIA H100 11", UUID[:-2] + "11", 9, 0, 132, memory),
    )
    assert (gpu_count(), gpu_uuid(0), gpu_uuid(2), gpu_uuid(-1)) == (2, f"GPU-{UUID}", "", "")
    assert present_device(1) is NAMED_DEVICES["h100"]


CALLS = [name.removeprefix("_") for name in vars(FakeDriver) if name.startswith("_cu")]


@pytest.mark.parametrize("driver", [None, object(), *map(FakeDriver, CALLS)], ids=["none", "old", *CALLS])
def test_a_driver_that_does_not_tell_leaves_it_to_torch(install: Callable[[Any], None], driver: Any) -> None:
    install(driver)
    assert driver_gpus() is None and gpu_count() == 0


def test_a_gpu_that_nobody_knows_by_name_is_left_to_torch(
    install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeDriver())
    monkeypatch.setattr(device, "NAMED_DEVICES", {})
    monkeypatch.setattr(device, "_torch", lambda: pytest.fail("torch is asked"))
    with pytest.raises(pytest.fail.Exception, match="torch is asked"):
        present_device(0)


def test_where_torch_is_imported_it_is_asked(install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeDriver())
    monkeypatch.setitem(sys.modules, "torch", object())
    assert gpu_count() == 0


@pytest.mark.parametrize(("cuda", "built"), [("'13.0'", True), ("None", False)])
def test_a_torch_that_has_no_cuda_cannot_use_the_gpus(cuda: str, built: bool, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    text = f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(text)
    words = "import sys; sys.path.insert(0, sys.argv[1]); from kernelwright.kernels import cuda_driver as c; "
    command = [sys.executable, "-c", words + "print(c._torch_has_cuda())", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{built}\n"
