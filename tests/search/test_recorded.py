from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.errors import ArchiveError
from kernelwright.search.budget import Budget
from kernelwright.search.recorded import (
    load_recorded,
    recorded_devices,
    recorded_path,
    save_recorded,
    vendor_trial,
)
from kernelwright.search.session import Session
from kernelwright.search.strategy import make_strategy
from kernelwright.types import FrozenMap, Measurement, Schedule, Status, Trial
from tests.search.fakes import DEVICE, TOOLCHAIN, WORKLOAD, FakeRunner, fake_space, trial, vendor, workload

MEMBERS = list(fake_space())
positive = st.floats(1e-3, 1e9)
counts = st.none() | st.integers(0, 1 << 40)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
knobs = st.dictionaries(
    st.sampled_from(["block_m", "split_k", "precision", "repack"]),
    st.integers(-5, 512) | st.booleans() | st.sampled_from(["bf16", "tf32"]) | positive,
)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    status = draw(st.sampled_from(Status))
    return Measurement(
        status,
        draw(positive) if status is Status.OK else None,
        (),
        draw(st.none() | positive),
        draw(counts),
        draw(counts),
        draw(counts),
        draw(st.none() | positive),
        draw(texts),
    )


trials_of_anything = st.builds(
    Trial,
    workload=st.builds(workload, st.integers(0, 1 << 20), st.sampled_from([64, 4096])),
    device=st.just(DEVICE),
    toolchain=st.just(TOOLCHAIN),
    schedule=st.builds(Schedule, st.sampled_from(["pointer", "vendor"]), st.builds(FrozenMap, knobs)),
    measurement=measurements(),
    origin=texts,
    template_fingerprint=texts,
    measured_at=texts,
)


@settings(max_examples=40, deadline=None)
@given(trials=st.lists(trials_of_anything, max_size=12))
def test_what_is_saved_comes_back(trials: list[Trial], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("recorded") / "h100" / "matmul.parquet"
    assert save_recorded(trials, path) == len(trials)
    loaded = load_recorded(path)
    assert loaded == trials
    assert [t.key for t in loaded] == [t.key for t in trials]


def test_single_readings_are_left_out(tmp_path: Path) -> None:
    seen = Measurement(Status.OK, 2.0, samples_us=(1.0, 2.0, 3.0))
    save_recorded([trial(MEMBERS[0], seen)], tmp_path / "a.parquet")
    assert load_recorded(tmp_path / "a.parquet") == [trial(MEMBERS[0], Measurement(Status.OK, 2.0))]


def test_files_are_small_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    many = [trial(schedule, of=workload(m)) for m in range(1, 41) for schedule in MEMBERS]
    save_recorded(many, path)
    assert path.stat().st_size < 12 * len(many)
    save_recorded(many[:3], path)
    assert load_recorded(path) == many[:3]
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.parquet must be a recording"):
        load_recorded(tmp_path / "nothing.parquet")


def test_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    save_recorded([trial(s) for s in MEMBERS], path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ArchiveError, match="damaged"):
        load_recorded(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [(None, "some other Parquet file"), ({"kernelwright.recorded": "2"}, "version 1 or earlier, got 2; upgrade")],
)
def test_files_of_others_and_of_later_versions_are_told(
    metadata: dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(metadata), path)
    with pytest.raises(ArchiveError, match=words):
        load_recorded(path)


def test_a_bad_row_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    save_recorded([trial(MEMBERS[0])], path)
    table = pq.read_table(path)
    at = table.column_names.index("status")
    pq.write_table(table.set_column(at, "status", pa.array(["excellent"])), path)
    with pytest.raises(ArchiveError, match="excellent"):
        load_recorded(path)


def test_packaged_recordings_have_a_folder_a_device() -> None:
    path = recorded_path("h100")
    assert path.parts[-2:] == ("h100", "matmul.parquet")
    assert (path.parents[1] / "__init__.py").is_file()


def test_devices_are_the_folders_with_recordings(tmp_path: Path) -> None:
    save_recorded([trial(MEMBERS[0])], tmp_path / "h200" / "matmul.parquet")
    save_recorded([trial(MEMBERS[0])], tmp_path / "h100" / "matmul.parquet")
    (tmp_path / "empty").mkdir()
    assert recorded_devices(tmp_path) == ["h100", "h200"]


def test_a_records_vendor_call_becomes_a_trial() -> None:
    runner = FakeRunner()
    session = Session(WORKLOAD, runner, make_strategy("random", WORKLOAD, DEVICE, runner.offered), Budget(trials=4))
    list(session)
    made = vendor_trial(session.record)
    assert made is not None
    assert made.schedule == vendor(110.0).schedule
    assert made.measurement.median_us == 110.0
    assert made.measured_at == session.record.created_at
