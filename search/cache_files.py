"""Compiled kernels on the move: what a compiler left in Triton's cache on one machine, put into the cache of another.

Triton finds a compiled kernel by a digest of its source, its options, the target and Triton itself, so that a machine
with the same release takes it as its own, and one with another release compiles for itself.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from kernelwright.errors import BuildFailed, KernelwrightError
from kernelwright.kernels.build import BUILD_TIMEOUT_S, BuildJob, BuildReport, build_here

Files = Mapping[str, bytes]
"""Contents by path inside the cache folder."""

_GROUP = "__grp__"


def build_and_pack(job: BuildJob) -> tuple[BuildReport | KernelwrightError, Files]:
    """Compile one schedule in this process, which must be there for nothing else, into an empty cache; what came of it,
    and the files. A compiler that takes longer than BUILD_TIMEOUT_S ends the process."""
    # Late, because it is the GPU stack.
    import triton

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, BUILD_TIMEOUT_S)
    try:
        with tempfile.TemporaryDirectory(prefix="kernelwright-build-") as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            try:
                report = build_here(job)
            except KernelwrightError as error:
                return error, {}
            except Exception as error:
                return BuildFailed(f"{type(error).__name__}: {error}"), {}
            return report, read_files(Path(folder))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def read_files(folder: Path) -> dict[str, bytes]:
    """Every compiled kernel in a cache folder."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def install_files(files: Files, folder: Path | None = None) -> None:
    """Put the files into a cache folder, by default Triton's own of this process; each appears whole or not at all."""
    if not files:
        return
    if folder is None:
        import triton

        folder = Path(triton.knobs.cache.dir)
    # The lists of a kernel's files come last, because Triton looks for them first.
    for name in sorted(files, key=lambda name: _GROUP in name):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BuildFailed(f"a compiled file must lie inside the cache folder, got {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _moved(files[name], path.parent) if path.name.startswith(_GROUP) else files[name]
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
        unfinished.write_bytes(content)
        os.replace(unfinished, path)


def _moved(group: bytes, folder: Path) -> bytes:
    """The list of a kernel's files, which Triton writes with whole paths, for another folder."""
    data = json.loads(group)
    data["child_paths"] = {name: str(folder / Path(path).name) for name, path in data["child_paths"].items()}
    return json.dumps(data).encode()
