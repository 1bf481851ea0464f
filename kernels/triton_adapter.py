"""Triton and torch as installed here: the one place that knows how their versions differ.

Works with triton 3.6 and 3.7. What needs neither (the toolchain's names) imports neither.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernelwright.errors import MissingDependency
from kernelwright.kernels.device import gpu_count, present_device
from kernelwright.kernels.operator import Launch
from kernelwright.types import DeviceSpec, Toolchain

NONE = "none"
"""Stands in a toolchain for a part that is not installed."""

_ASSEMBLER = "TRITON_PTXAS_PATH"

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class StubDriver:
    """Stands in for a GPU driver so that Triton compiles for a target that is not in this machine."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device, and a kernel of one target is of no use to another.
        return f"{self.target.backend}:{self.target.arch}"

    def set_current_device(self, device: Any) -> None:
        """There is nothing to set."""

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_properties(self, device: Any = None) -> dict[str, Any]:
        return {}


def gpu_target(device: DeviceSpec) -> Any:
    """Triton's GPUTarget for a device."""
    from triton.backends.compiler import GPUTarget

    if device.vendor == "amd":
        return GPUTarget("hip", device.architecture, device.warp_size)
    return GPUTarget("cuda", int(device.architecture.removeprefix("sm_")), device.warp_size)


@contextlib.contextmanager
def targeting(device: DeviceSpec) -> Iterator[None]:
    """Inside, Triton compiles for `device`, tensors without data pass for tensors on it, and nothing can be launched.
    For child processes: it is global state."""
    from triton.runtime import driver

    driver.set_active(StubDriver(gpu_target(device)))
    try:
        with _meta_tensors_on(device):
            yield
    finally:
        driver.set_active(None)


@contextlib.contextmanager
def _meta_tensors_on(device: DeviceSpec) -> Iterator[None]:
    """Inside, meta tensors are on the device for whoever asks how many multiprocessors it has. What a plan makes of the
    answer are numbers that Triton specialises kernels for, so that other ones would be compiled than are launched."""
    import torch

    on_cuda: Any = torch._C.TensorBase.is_cuda
    cuda: Any = torch.cuda
    properties_of = cuda.get_device_properties
    ours = types.SimpleNamespace(name=device.name, multi_processor_count=device.multiprocessors)

    def properties(which: Any = None) -> Any:
        return ours if isinstance(which, torch.device) and which.type == "meta" else properties_of(which)

    tensors: Any = torch.Tensor
    tensors.is_cuda = property(lambda tensor: tensor.is_meta or on_cuda.__get__(tensor))
    cuda.get_device_properties = properties
    try:
        yield
    finally:
        cuda.get_device_properties = properties_of
        del tensors.is_cuda


def import_compiler() -> None:
    """Import what a build needs. For processes that will build, before the first job comes, and before it forks."""
    for name in ("torch", "triton.compiler", "triton.experimental.gluon.language.nvidia.hopper"):
        importlib.import_module(name)
    hash_triton()


def ready_to_launch() -> None:
    """Have Triton's driver made, which compiles C code where its cache does not hold it yet."""
    from triton.runtime import driver

    _ = driver.active.utils


def settle_compiler() -> None:
    """Name Triton's cache and its assembler in the environment, which Inductor otherwise does for the whole process:
    a cache folder of its own and torch's assembler. What was tuned would be compiled again, by another compiler."""
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    if _set_by_inductor():
        del os.environ[_ASSEMBLER]
    # there is none for AMD
    with contextlib.suppress(RuntimeError):
        os.environ.setdefault(_ASSEMBLER, knobs.nvidia.ptxas.path)


def with_settled_keys(launches: list[Launch]) -> list[Launch]:
    """The launches, whose kernels have the same keys in Triton's cache on disk in every process.

    Triton takes the globals of a called function into its caller's key before it has looked at that function, unless
    another kernel has had it look before (`_update_hash`, seen in 3.6 and 3.7.1): what one process compiled, another
    would not find. Here every function is looked at before those that call it.
    """
    for kernel, *_ in launches:
        # the interpreter's functions have none
        if getattr(kernel, "hash", "") is None:
            _settle_key(kernel, set())
    return launches


def _settle_key(function: Any, seen: set[int]) -> None:
    seen.add(id(function))
    for called in _functions_in(function.fn):
        if called.hash is None and id(called) not in seen:
            _settle_key(called, seen)
    _ = function.cache_key


def _functions_in(function: types.FunctionType) -> list[Any]:
    """Triton's functions that a function names, also as attributes of modules and parts of aggregates."""
    from triton.runtime.jit import JITCallable

    names, outside = function.__code__.co_names, inspect.getclosurevars(function)
    waiting, found, functions = [*outside.nonlocals.values(), *outside.globals.values()], set[int](), []
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found.add(id(value))
        if isinstance(value, types.ModuleType):
            waiting += [vars(value)[name] for name in names if name in vars(value)]
        elif getattr(value, "__triton_aggregate__", False):
            waiting += value.hash_attrs
        elif isinstance(value, JITCallable):
            functions.append(value)
    return functions


def renew_inductors_workers(timeout_s: float = 60.0) -> bool:
    """Have Inductor start other workers where those it has keep another assembler than this process; whether it did.

    Max-autotune looks for what its workers compiled and would compile every choice again by itself, one after the
    other: 8 to 40 s for a product instead of 0.3. Workers at work are left to end by themselves. timeout_s: how long
    the new ones are waited for.
    """
    from torch._inductor.async_compile import AsyncCompile

    if not AsyncCompile.process_pool.cache_info().currsize:
        return False
    process: Any = getattr(AsyncCompile.process_pool(), "process", None)
    try:
        same = _assembler_of(process.pid) == os.environ.get(_ASSEMBLER)
    except (AttributeError, OSError):
        # workers of another kind, or on a system that does not tell what they were started with
        return False
    if same:
        return False
    AsyncCompile.process_pool.cache_clear()
    AsyncCompile._ready_future = None
    with contextlib.suppress(TimeoutError):
        AsyncCompile.wait_pool_ready(timeout=timeout_s)
    return True


def _assembler_of(pid: int) -> str:
    """The assembler that a process was started with, or takes as Inductor's worker: torch's, if there is one."""
    import torch
    from triton import knobs

    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    if entries == [b""]:
        raise ProcessLookupError(f"process {pid} ends or begins")
    named = [entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(f"{_ASSEMBLER}=".encode())]
    torchs = Path(torch.__file__).parent / "bin" / "ptxas"
    return named[0] if named else str(torchs) if torchs.exists() else str(knobs.nvidia.ptxas.path)


def hash_triton() -> None:
    """Have Triton hash all of itself (400 MB, about half a second), which it does before a process's first launch.
    Other threads run meanwhile."""
    from triton.runtime.cache import triton_key

    triton_key()


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _set_by_inductor() -> bool:
    """Whether the assembler that the environment names is torch's: no user chose it."""
    torch = importlib.util.find_spec("torch")
    named = Path(os.environ.get(_ASSEMBLER, ""))
    return torch is not None and any(named.is_relative_to(f) for f in torch.submodule_search_locations or ())


def compile_launch(launch: Launch) -> Any:
    """Triton's CompiledKernel for one launch, into Triton's disk cache with all that launching it needs, without
    running it."""
    kernel, grid, args, options = launch
    compiled = kernel.warmup(*args, grid=grid, **options)
    # The function itself would keep every version ever compiled.
    kernel.device_caches.clear()
    _compile_launcher(compiled)
    return compiled


def _compile_launcher(compiled: Any) -> None:
    """Triton 3.6 launches a CUDA kernel through a C function of its signature, which the C compiler makes at the first
    launch: a third of a second in which the GPU would wait. Newer ones have one function for all."""
    if compiled.metadata.target.backend != "cuda":
        return
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        # without the CUDA driver or a C compiler, nothing is launched on this machine either
        with contextlib.suppress(AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError):
            driver.CudaLauncher(compiled.src, compiled.metadata)


def shared_bytes(compiled: Any) -> int:
    """Bytes of shared memory that a block of a compiled kernel needs."""
    return int(compiled.metadata.shared)


def threads(compiled: Any) -> int:
    """Threads of a block of a compiled kernel."""
    return int(compiled.metadata.num_warps) * int(compiled.metadata.target.warp_size)


def tensor_memory_columns(compiled: Any) -> int:
    """Columns of Blackwell's tensor memory that a block of a compiled kernel needs."""
    return int(getattr(compiled.metadata, "tmem_size", None) or 0)


def registers_and_spills(compiled: Any) -> tuple[int, int]:
    """(32-bit registers, bytes of local memory) of a thread of a compiled kernel, without a GPU."""
    if "cubin" in compiled.asm:
        return _of_cubin(compiled.asm["cubin"])
    return _of_amdgcn(compiled.asm["amdgcn"])


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = [dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", line)) for line in words.splitlines() if "REG:" in line]
    registers = max((int(entry["REG"]) for entry in usage), default=0)
    return registers, max((int(entry["STACK"]) + int(entry["LOCAL"]) for entry in usage), default=0)


def _of_amdgcn(assembly: str) -> tuple[int, int]:
    def most(name: str) -> int:
        return max(map(int, re.findall(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)), default=0)

    return most("vgpr_count"), most("private_segment_fixed_size")


def assembly_of(compiled: Any) -> dict[str, str | bytes]:
    """Every stage of a compiled kernel: ttir, ttgir, llir, ptx and cubin, or amdgcn and hsaco."""
    return {stage: compiled.asm[stage] for stage in compiled.asm}


def current_toolchain(timer: int, architecture: str | None = None) -> Toolchain:
    """The software here. timer: version of the timing protocol. architecture: the target; None means the GPU here.

    Parts that are not installed are "none".
    """
    if architecture is None:
        architecture = present_device().architecture if gpu_count() else "sm_90"
    return Toolchain(
        triton=_version("triton", "__init__.py"),
        torch=_version("torch", "version.py"),
        driver=_driver_version(),
        compiler=_compiler(architecture),
        timer=timer,
    )


def require_triton() -> None:
    """MissingDependency when torch or triton is not installed."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"building kernels needs {' and '.join(missing)}; install them with: pip install 'kernelwright[torch]'"
        )


def _version(package: str, file: str) -> str:
    """The version that a package's source states; importing torch for it would take seconds."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return NONE
    text = (Path(found.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
    match = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    return match[1] if match else "unknown"


def _driver_version() -> str:
    """NVIDIA's kernel driver ("580.65.06"), ROCm's version where torch is built for it, or "none"."""
    if _DRIVER_FILE.exists():
        match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", _DRIVER_FILE.read_text())
        return match[1] if match else "unknown"
    if gpu_count():
        torch = importlib.import_module("torch")
        return f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch._C._cuda_getDriverVersion()}"
    return NONE


@functools.cache
def _compiler(architecture: str) -> str:
    """What makes the machine code: "ptxas 12.8.93", or the LLVM inside triton for AMD."""
    if importlib.util.find_spec("triton") is None:
        return NONE
    if architecture.startswith("gfx"):
        return f"llvm of triton {_version('triton', '__init__.py')}"
    knobs = importlib.import_module("triton.knobs")
    blackwell = int(architecture.removeprefix("sm_")) >= 100
    inductors = os.environ.pop(_ASSEMBLER) if _set_by_inductor() else None
    try:
        tool = knobs.nvidia.ptxas_blackwell if blackwell else knobs.nvidia.ptxas
    finally:
        if inductors is not None:
            os.environ[_ASSEMBLER] = inductors
    words = subprocess.run([tool.path, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+(?:\.\d+)+)", words)
    return f"ptxas {match[1]}" if match else "ptxas unknown"
