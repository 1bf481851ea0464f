"""A kernel compiled in one place is found by the compiler in another, and a hostile file goes nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelwright.errors import BuildFailed
from kernelwright.kernels.build import BuildJob, BuildReport
from kernelwright.kernels.child_process import ChildProcess
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search.cache_files import install_files, read_files
from kernelwright.types import FrozenMap, Schedule

WORKLOAD = matmul_workload(256, 256, 256, "fp16")
SMALL = {"block_m": 64, "block_n": 64, "block_k": 64, "num_stages": 2, "num_warps": 4, "group_m": 1}


def job(**changed: int) -> BuildJob:
    knobs = {**SMALL, "split_k": 1, "precision": "fp16", **changed}
    schedule = Schedule("pointer", FrozenMap(knobs))
    return BuildJob(WORKLOAD, schedule, named_device("h100"), "kernelwright.kernels.build:plan_on_meta", False)


def test_compiled_here_is_found_there(tmp_path: Path) -> None:
    environment = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(tmp_path / "there")}
    with ChildProcess("kernelwright.search.cache_files:build_and_pack", env=environment) as compiler:
        report, files = compiler.call(job())
        failed, none = compiler.call(job(block_m=48))
    assert isinstance(report, BuildReport) and report.registers > 0
    assert any(name.endswith(".cubin") for name in files)
    assert isinstance(failed, Exception) and not none
    assert not (tmp_path / "there").exists()

    install_files(files, tmp_path / "there")
    with ChildProcess("kernelwright.kernels.build:build_here", env=environment) as other:
        again = other.call(job())
    assert (again.registers, again.shared_bytes) == (report.registers, report.shared_bytes)
    assert set(read_files(tmp_path / "there")) == set(files), "nothing was compiled a second time"


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for name in ("../stolen", "/etc/stolen"):
        with pytest.raises(BuildFailed, match="must lie inside the cache folder"):
            install_files({name: b"x"}, folder)
    assert not list(tmp_path.rglob("stolen")) and not os.path.exists("/etc/stolen")
