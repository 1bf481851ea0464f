"""From what a user types as the device to the runner that measures on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernelwright.errors import UnknownDevice
from kernelwright.search.recorded import load_recorded, recorded_devices, recorded_folder
from kernelwright.search.replay_runner import ReplayRunner
from kernelwright.search.runner import Runner
from kernelwright.types import Trial

_GPU = re.compile(r"(?:cuda|gpu|rocm|hip)(?::(\d+))?")


def open_runner(spec: str, *, recorded: Path | None = None) -> Runner:
    """The runner for "cuda", "cuda:1", "gpu" (a GPU of this machine) or "replay:h100" (a recording of one).

    recorded: a recording, or a folder of them laid out as those packaged, to replay instead.
    UnknownDevice when there is no such GPU or recording; close the runner when done.
    """
    kind, _, slug = spec.strip().lower().partition(":")
    if kind == "replay":
        return _open_replay(slug, recorded)
    match = _GPU.fullmatch(spec.strip().lower())
    if match is None:
        raise UnknownDevice(
            f'device must be "cuda", "cuda:<index>" or "replay:<name>" to be measured on, got {spec!r}; '
            f"recordings: {', '.join(recorded_devices()) or 'none'}"
        )
    # Late, because it brings torch and triton.
    from kernelwright.search.child_runner import ChildRunner

    return ChildRunner(int(match[1] or 0))


def _open_replay(slug: str, recorded: Path | None) -> ReplayRunner:
    trials = list(_replayed(slug, recorded))
    if not trials:
        known = recorded_devices(recorded if recorded is not None and recorded.is_dir() else None)
        raise UnknownDevice(f"replay needs a recorded device, got {slug!r}; recorded: {', '.join(known) or 'none'}")
    return ReplayRunner(trials, trials[0].device)


def _replayed(slug: str, recorded: Path | None) -> Iterator[Trial]:
    if recorded is not None and not recorded.is_dir():
        yield from (trial for trial in load_recorded(recorded) if slug in ("", trial.device.slug))
        return
    for path in sorted((recorded or recorded_folder()).glob("*/*.parquet")):
        if path.parent.name == slug:
            yield from load_recorded(path)
