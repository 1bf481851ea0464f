from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.errors import UnknownDevice
from kernelwright.search import child_runner
from kernelwright.search.open_runner import open_runner
from kernelwright.search.recorded import save_recorded
from kernelwright.search.replay_runner import ReplayRunner
from tests.search.fakes import DEVICE, WORKLOAD, fake_space, trial

ONE = next(iter(fake_space()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_recorded([trial(ONE)], tmp_path / "h100" / "matmul.parquet")
    return tmp_path


@pytest.mark.parametrize("spec", ["replay:h100", "Replay:H100", " replay:h100 "])
def test_a_replay_reads_the_recording(spec: str, folder: Path) -> None:
    runner = open_runner(spec, recorded=folder)
    assert isinstance(runner, ReplayRunner)
    assert runner.device == DEVICE
    assert list(runner.space(WORKLOAD)) == [ONE]


@pytest.mark.parametrize("spec", ["replay:h100", "replay"])
def test_a_single_file_can_be_replayed(spec: str, folder: Path) -> None:
    runner = open_runner(spec, recorded=folder / "h100" / "matmul.parquet")
    assert isinstance(runner, ReplayRunner)


def test_a_device_without_a_recording_is_told_those_there_are(folder: Path) -> None:
    with pytest.raises(UnknownDevice, match="got 'b200'; recorded: h100"):
        open_runner("replay:b200", recorded=folder)


@pytest.mark.parametrize("spec", ["h100", "cuda:", "cuda:x", "", "tpu"])
def test_what_cannot_be_measured_on_is_told(spec: str) -> None:
    with pytest.raises(UnknownDevice, match='must be "cuda", "cuda:<index>" or "replay:<name>"'):
        open_runner(spec)


@pytest.mark.parametrize(("spec", "index"), [("cuda", 0), ("gpu", 0), ("cuda:1", 1), ("GPU:3", 3)])
def test_a_gpu_is_opened_by_its_index(spec: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_runner, "ChildRunner", lambda device_index: ("opened", device_index))
    assert open_runner(spec) == ("opened", index)
