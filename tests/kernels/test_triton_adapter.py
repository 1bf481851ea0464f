"""What the adapter reads off compiled kernels and installed packages."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.runtime import driver

from kernelwright.kernels import get_operator, triton_adapter
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import StubDriver, current_toolchain, gpu_target, targeting
from kernelwright.types import DeviceSpec, Workload


def compiled(**asm: Any) -> Any:
    metadata = types.SimpleNamespace(
        shared=1024, num_warps=8, target=types.SimpleNamespace(warp_size=64), tmem_size=None
    )
    return types.SimpleNamespace(asm=asm, metadata=metadata)


AMD_METADATA = """
    .agpr_count:     16
    .private_segment_fixed_size: 24
    .sgpr_count:     32
    .vgpr_count:     116
    .vgpr_spill_count: 6
"""


def test_amd_resources_are_read_from_the_assembly() -> None:
    assert triton_adapter.registers_and_spills(compiled(amdgcn=AMD_METADATA)) == (116, 24)


def test_nvidia_resources_are_read_from_what_cuobjdump_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "cuobjdump"
    usage = " Function matmul:\n  REG:168 STACK:40 SHARED:0 LOCAL:8 CONSTANT[0]:600 TEXTURE:0\n"
    tool.write_text(f"#!/bin/sh\necho release 12.8\ntest -s $2 && printf '%s' '{usage}' || true\n")
    tool.chmod(0o755)
    monkeypatch.setenv("TRITON_CUOBJDUMP_PATH", str(tool))
    assert triton_adapter.registers_and_spills(compiled(cubin=b"machine code")) == (168, 48)


def test_limits_of_a_block() -> None:
    kernel = compiled()
    assert triton_adapter.shared_bytes(kernel) == 1024
    assert triton_adapter.threads(kernel) == 512
    assert triton_adapter.tensor_memory_columns(kernel) == 0


@pytest.mark.parametrize(
    ("slug", "target"),
    [("h100", ("cuda", 90, 32)), ("rtx5090", ("cuda", 120, 32)), ("mi355x", ("hip", "gfx950", 64))],
)
def test_targets(slug: str, target: tuple[object, ...]) -> None:
    found = gpu_target(named_device(slug))
    assert (found.backend, found.arch, found.warp_size) == target


def test_targeting_stands_in_for_the_driver_and_leaves() -> None:
    with targeting(named_device("h100")):
        assert isinstance(driver.active, StubDriver)
        assert driver.active.get_current_target().arch == 90
        one = driver.active.get_current_device()
    with targeting(named_device("a100")):
        assert driver.active.get_current_device() != one
    assert driver._active is None


CONVOLUTIONS = ("implicit_gemm_tma", "implicit_gemm_warp_specialized", "resident_weights")


def grids(workload: Workload, template: str, device: DeviceSpec) -> set[tuple[int, ...]]:
    """The grids of a template's schedules, planned on tensors without data."""
    operator = get_operator(workload.operator)
    members = operator.templates[template].space(workload, named_device("h100")).sample(random.Random(0), 8)
    inputs = operator.make_inputs(workload, 0, "meta")
    with targeting(device):
        plans = [operator.plan(workload, one, inputs, operator.empty_output(workload, "meta")) for one in members]
    return {launch[1] for plan in plans for launch in plan}


@pytest.mark.parametrize(
    ("template", "workload"),
    [
        *((name, matmul_workload(2048, 4864, 896)) for name in ("persistent_tma", "stream_k", "warp_specialized")),
        ("stream_k_warp_specialized", matmul_workload(2048, 1280, 8192)),
        ("grouped", matmul_workload(4096, 1024, 1024, groups=8)),
        ("forward_warp_specialized", attention_workload(8, 32, 2048, 2048, 128)),
        *((name, conv2d_workload((32, 64, 56, 56), 64, 3, padding=1)) for name in CONVOLUTIONS),
        ("pointwise", conv2d_workload((32, 256, 56, 56), 128, 1)),
        (
            "weight_gradient_warp_specialized",
            conv2d_workload((32, 128, 28, 28), 128, 3, padding=1, direction="weight_gradient"),
        ),
    ],
)
def test_plans_without_data_are_those_of_the_device(template: str, workload: Workload) -> None:
    """A plan's numbers follow from how many programs the device runs, and kernels are specialised for them."""
    h100 = named_device("h100")
    counts = (h100.multiprocessors, h100.multiprocessors // 2)
    here, half = (grids(workload, template, dataclasses.replace(h100, multiprocessors=count)) for count in counts)
    assert here and here != half


def test_tensors_are_themselves_again_after_a_build() -> None:
    before = torch.cuda.get_device_properties
    with pytest.raises(ZeroDivisionError), targeting(named_device("h100")):
        assert torch.empty(1, device="meta").is_cuda and not torch.empty(1).is_cuda
        raise ZeroDivisionError
    assert not torch.empty(1, device="meta").is_cuda
    assert torch.cuda.get_device_properties is before


def test_a_launcher_of_its_own_is_compiled_with_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda source, metadata: made.append((source, metadata)))
    for backend in ("cuda", "hip"):
        kernel = compiled()
        kernel.src, kernel.metadata.target.backend = object(), backend
        triton_adapter._compile_launcher(kernel)
        assert made[-1] == (made[0][0], made[0][1]) and len(made) == 1
    monkeypatch.delattr(nvidia, "make_launcher")
    kernel = compiled()
    kernel.metadata.target.backend = "cuda"
    triton_adapter._compile_launcher(kernel)
    assert len(made) == 1


def test_a_triton_without_nvidias_part_compiles_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton.backends.nvidia", "triton.backends.nvidia.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    kernel = compiled()
    kernel.metadata.target.backend = "hip"
    triton_adapter._compile_launcher(kernel)


def test_toolchain_names_what_is_installed() -> None:
    toolchain = current_toolchain(7, "sm_90")
    assert (toolchain.triton, toolchain.torch, toolchain.timer) == (triton.__version__, torch.__version__, 7)
    assert re.fullmatch(r"ptxas \d+\.\d+\.\d+", toolchain.compiler)
    assert current_toolchain(7, "gfx942").compiler == f"llvm of triton {triton.__version__}"
    assert current_toolchain(7, "sm_90").key == toolchain.key


def test_toolchain_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_adapter.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(triton_adapter, "_DRIVER_FILE", Path("/nonexistent"))
    monkeypatch.setattr(triton_adapter, "gpu_count", lambda: 0)
    triton_adapter._compiler.cache_clear()
    found = current_toolchain(1)
    triton_adapter._compiler.cache_clear()
    assert {found.triton, found.torch, found.driver, found.compiler} == {"none"}


def test_driver_version_is_read_from_the_kernel_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.2\n"
    )
    monkeypatch.setattr(triton_adapter, "_DRIVER_FILE", file)
    assert current_toolchain(1, "sm_90").driver == "580.65.06"


def test_the_cache_stays_where_it_is_when_inductor_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor names a folder of its own in the environment unless one is named there already."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    before = knobs.cache.dir
    assert triton_cache_dir(0) != before
    triton_adapter.settle_compiler()
    assert triton_cache_dir(0) == before == os.environ["TRITON_CACHE_DIR"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    triton_adapter.settle_compiler()
    assert knobs.cache.dir == "/elsewhere"


def test_the_assembler_is_tritons_unless_a_user_chose_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor names torch's assembler for the whole process; records of Triton's own would count as stale."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    own, toolchain = knobs.nvidia.ptxas.path, current_toolchain(1, "sm_90")
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.1, V99.1.2\n", encoding="utf-8")
    other.chmod(0o755)
    for torchs in (Path(torch.__file__).parent / "bin" / "ptxas", Path(torch.__file__).parent / "_inductor" / "ptxas"):
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(torchs))
        triton_adapter._compiler.cache_clear()
        assert current_toolchain(1, "sm_90") == toolchain
        assert os.environ["TRITON_PTXAS_PATH"] == str(torchs), "looking changes nothing"
        triton_adapter.settle_compiler()
        assert os.environ["TRITON_PTXAS_PATH"] == own
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    triton_adapter.settle_compiler()
    assert os.environ["TRITON_PTXAS_PATH"] == str(other)
    triton_adapter._compiler.cache_clear()
    assert current_toolchain(1, "sm_90").compiler == "ptxas 99.1.2"
    triton_adapter._compiler.cache_clear()


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended behind the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def sleeper() -> subprocess.Popen[bytes]:
    """A process that is up: its environment can be read."""
    process = subprocess.Popen(["sleep", "60"])
    while not Path(f"/proc/{process.pid}/environ").read_bytes():
        time.sleep(0.001)
    return process


def test_inductors_workers_are_renewed_where_they_have_another_assembler(
    monkeypatch: pytest.MonkeyPatch, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """What workers compile with one assembler, a process with another does not find: max-autotune compiled each choice
    again."""
    from torch._inductor.async_compile import AsyncCompile

    def pool_with(assembler: str | None) -> None:
        """Inductor has one worker, which does nothing; None: it has none yet."""
        monkeypatch.setattr(AsyncCompile, "process_pool", functools.lru_cache(start))
        if assembler is not None:
            monkeypatch.setenv("TRITON_PTXAS_PATH", assembler)
            AsyncCompile.process_pool()
        monkeypatch.setenv("TRITON_PTXAS_PATH", "/own/ptxas")

    def start() -> types.SimpleNamespace:
        sleepers.append(sleeper())
        return types.SimpleNamespace(process=sleepers[-1])

    waited: list[float] = []
    monkeypatch.setattr(AsyncCompile, "wait_pool_ready", lambda timeout: waited.append(timeout))
    monkeypatch.setattr(AsyncCompile, "_ready_future", "of the old ones")
    pool_with(None)
    assert not triton_adapter.renew_inductors_workers()
    assert not sleepers, "looking starts none"
    pool_with("/own/ptxas")
    assert not triton_adapter.renew_inductors_workers()
    pool_with("/torchs/ptxas")
    assert triton_adapter.renew_inductors_workers(7.0)
    assert (waited, AsyncCompile._ready_future) == ([7.0], None)
    AsyncCompile.process_pool()
    assert not triton_adapter.renew_inductors_workers(), "the new one has what this process has"
    pool_with("/torchs/ptxas")
    sleepers[-1].kill()
    sleepers[-1].wait()
    assert not triton_adapter.renew_inductors_workers(), "who has ended tells nothing"


def test_a_worker_without_a_name_for_its_assembler_takes_torchs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    sleepers.append(sleeper())
    # builds of torch for a CPU have none
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert triton_adapter._assembler_of(sleepers[0].pid) == knobs.nvidia.ptxas.path
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ptxas").touch()
    assert triton_adapter._assembler_of(sleepers[0].pid) == str(tmp_path / "bin" / "ptxas")


KEYS_IN_AN_ORDER = """
import importlib, json, sys
from triton.runtime.jit import JITFunction
from kernelwright.kernels import OPERATORS
from kernelwright.kernels.triton_adapter import with_settled_keys
backwards = sys.argv[1] == "1"
modules = sorted({t.kernel_module for o in OPERATORS.values() for t in o.templates.values()}, reverse=backwards)
kernels = {}
for module in map(importlib.import_module, modules):
    functions = [f for f in vars(module).values() if isinstance(f, JITFunction)]
    kernels |= {f"{f.__module__}.{f.__name__}": f for f in (functions[::-1] if backwards else functions)}
print(json.dumps({name: with_settled_keys([(f, (1,), (), {})])[0][0].cache_key for name, f in kernels.items()}))
"""


def test_a_kernel_has_one_key_whatever_a_process_compiled_before() -> None:
    """What a compiler process built was not found by the process that launched it: Triton leaves globals of called
    functions out of a key unless it has met these functions before."""
    command = [sys.executable, "-c", KEYS_IN_AN_ORDER]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    running = [subprocess.Popen([*command, order], stdout=subprocess.PIPE, env=env, text=True) for order in "01"]
    first, second = (json.loads(process.communicate()[0]) for process in running)
    assert len(first) > 100
    assert {name for name in first if first[name] != second[name]} == set()
