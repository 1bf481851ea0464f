"""The vocabulary: JSON round trips, keys that never change, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.types import (
    DTYPES,
    DeviceSpec,
    FrozenMap,
    Measurement,
    Schedule,
    Status,
    Toolchain,
    Trial,
    TuningRecord,
    Workload,
    canonical_json,
    digest,
)

WORKLOAD = Workload(
    "matmul",
    FrozenMap({"M": 128, "N": 256, "K": 512}),
    FrozenMap({"a": "bf16", "b": "bf16", "out": "bf16"}),
    FrozenMap({"a": "row", "b": "col", "out": "row"}),
    ("bias", "gelu"),
    error_budget=1e-3,
)
DEVICE = DeviceSpec(
    "h100", "NVIDIA H100", "nvidia", "sm_90", 132, 232448, 50 * 2**20, 80 * 2**30, 3350.0, FrozenMap({"bf16": 989.4})
)
TOOLCHAIN = Toolchain("3.7.1", "2.13.0", "580.65.06", "ptxas 12.8.93", 1)
SCHEDULE = Schedule("pointer", FrozenMap({"block_m": 64, "precision": "bf16"}))
MEASUREMENT = Measurement(Status.OK, 12.5, (12.4, 12.5, 12.6), error=1.7e-3, registers=128)
TRIAL = Trial(WORKLOAD, DEVICE, TOOLCHAIN, SCHEDULE, MEASUREMENT, "tune", "abc", "2026-01-02T03:04:05Z")
RECORD = TuningRecord(
    WORKLOAD,
    DEVICE,
    TOOLCHAIN,
    SCHEDULE,
    MEASUREMENT,
    "abc",
    "tune",
    "2026-01-02T03:04:05Z",
    "torch.mm",
    14.0,
    trials=24,
)

GOLDEN_KEYS = {
    "13d71860e5b653204d65": WORKLOAD,
    "7a388a46e05b61c2e25f": DEVICE,
    "d801c92a1c87acf4ae11": TOOLCHAIN,
    "d40a20596c57fc231d27": SCHEDULE,
    "e427cac8e0e8d181cefc": MEASUREMENT,
    "cbe737b6ca0db0c570c6": TRIAL,
    "6d234b1352504486b306": RECORD,
}
"""Databases and archives hold these: a change here makes every stored result unreachable."""

NAMES = st.text(min_size=1, max_size=8)
NUMBERS = st.floats(0.001, 1e9)
SCALARS = st.one_of(
    st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), NAMES, st.booleans()
)


def maps(values: st.SearchStrategy[Any]) -> st.SearchStrategy[FrozenMap[Any]]:
    return st.dictionaries(NAMES, values, max_size=4).map(FrozenMap)


WORKLOADS = st.builds(
    Workload,
    operator=NAMES,
    dims=maps(st.integers(0, 2**40)),
    dtypes=maps(st.sampled_from(sorted(DTYPES))),
    layouts=maps(NAMES),
    epilogue=st.lists(NAMES, max_size=3).map(tuple),
    attributes=maps(SCALARS),
    error_budget=st.none() | st.floats(1e-9, 0.5),
)
DEVICES = st.builds(
    DeviceSpec,
    slug=NAMES,
    name=NAMES,
    vendor=NAMES,
    architecture=NAMES,
    multiprocessors=st.integers(1, 500),
    shared_memory_bytes=st.integers(1, 2**20),
    l2_bytes=st.integers(1, 2**30),
    memory_bytes=st.integers(1, 2**40),
    bandwidth_gbs=NUMBERS,
    peak_tflops=maps(NUMBERS),
    registers=st.integers(1, 2**20),
    warp_size=st.sampled_from([32, 64]),
    source=st.text(max_size=8),
)
TOOLCHAINS = st.builds(Toolchain, NAMES, NAMES, NAMES, NAMES, st.integers(0, 99))
SCHEDULES = st.builds(Schedule, NAMES, maps(SCALARS))
GOOD = st.builds(
    Measurement,
    status=st.just(Status.OK),
    median_us=NUMBERS,
    samples_us=st.lists(NUMBERS, max_size=3).map(tuple),
    error=st.none() | NUMBERS,
    registers=st.none() | st.integers(0, 255),
    spills=st.none() | st.integers(0, 4096),
    shared_bytes=st.none() | st.integers(0, 2**20),
    compile_s=st.none() | NUMBERS,
)
FAILED = st.builds(Measurement, status=st.sampled_from([s for s in Status if s is not Status.OK]), message=st.text())
TRIALS = st.builds(Trial, WORKLOADS, DEVICES, TOOLCHAINS, SCHEDULES, GOOD | FAILED, NAMES, NAMES, NAMES)
RECORDS = st.builds(
    TuningRecord,
    *(WORKLOADS, DEVICES, TOOLCHAINS, SCHEDULES, GOOD, NAMES, NAMES, NAMES),
    vendor=NAMES,
    vendor_us=st.none() | NUMBERS,
    runner_up=st.none() | SCHEDULES,
    runner_up_us=st.none() | NUMBERS,
    trials=st.integers(0, 999),
)
ANY_VALUE = st.one_of(WORKLOADS, DEVICES, TOOLCHAINS, SCHEDULES, GOOD, FAILED, TRIALS, RECORDS)


@given(ANY_VALUE)
def test_json_and_pickle_round_trips_keep_value_key_and_hash(value: Any) -> None:
    there_and_back = type(value).from_json(json.loads(json.dumps(value.to_json())))
    for copy in (there_and_back, pickle.loads(pickle.dumps(value))):
        assert copy == value
        assert copy.key == value.key
        assert hash(copy) == hash(value)


@pytest.mark.parametrize(("key", "value"), GOLDEN_KEYS.items(), ids=lambda x: x if isinstance(x, str) else "")
def test_keys_are_those_of_every_release(key: str, value: Any) -> None:
    assert value.key == key


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_keys_are_equal_in_another_process(seed: str) -> None:
    values = [(type(value).__name__, value.to_json()) for value in GOLDEN_KEYS.values()]
    program = (
        "import json, sys, kernelwright.types as types\n"
        "for name, data in json.load(sys.stdin): print(getattr(types, name).from_json(data).key)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(values),
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == list(GOLDEN_KEYS)


def reordered(value: Any) -> Any:
    """The same JSON with every object's entries the other way round."""
    if isinstance(value, dict):
        return {name: reordered(value[name]) for name in reversed(list(value))}
    return [reordered(part) for part in value] if isinstance(value, list) else value


@given(ANY_VALUE)
def test_order_of_fields_and_entries_does_not_matter(value: Any) -> None:
    again = type(value).from_json(reordered(value.to_json()))
    assert (again, again.key, hash(again)) == (value, value.key, hash(value))


@pytest.mark.parametrize("value", GOLDEN_KEYS.values(), ids=lambda value: type(value).__name__)
def test_defaults_are_left_out_so_that_new_fields_change_no_key(value: Any) -> None:
    for field in dataclasses.fields(value):
        if field.default is not dataclasses.MISSING and getattr(value, field.name) == field.default:
            assert field.name not in value.to_json()
    given_anyway = {**value.to_json(), **({"registers": 65536} if isinstance(value, DeviceSpec) else {})}
    assert type(value).from_json(given_anyway).key == value.key


def test_what_is_shown_is_not_in_a_devices_key() -> None:
    shown = {"slug": "x", "name": "y", "source": "z", "memory_bytes": 1, "peak_tflops": FrozenMap({"fp16": 1.0})}
    assert dataclasses.replace(DEVICE, **shown).key == DEVICE.key
    assert dataclasses.replace(DEVICE, bandwidth_gbs=4800.0).key != DEVICE.key


@pytest.mark.parametrize(
    "change",
    [
        {"operator": "conv2d"},
        {"dims": FrozenMap({"M": 129, "N": 256, "K": 512})},
        {"layouts": FrozenMap({"a": "row", "b": "row", "out": "row"})},
        {"epilogue": ("gelu", "bias")},
        {"attributes": FrozenMap({"causal": True})},
        {"error_budget": None},
    ],
)
def test_everything_in_a_workload_is_in_its_key(change: dict[str, Any]) -> None:
    assert dataclasses.replace(WORKLOAD, **change).key != WORKLOAD.key


def test_a_trials_key_leaves_the_outcome_out_and_a_records_the_schedule() -> None:
    failed = Measurement(Status.CRASHED, message="illegal memory access")
    assert dataclasses.replace(TRIAL, measurement=failed).key == TRIAL.key
    assert dataclasses.replace(TRIAL, measured_at="2026-01-02T03:04:06Z").key != TRIAL.key
    assert dataclasses.replace(RECORD, schedule=Schedule("skinny")).key == RECORD.key
    assert dataclasses.replace(RECORD, template_fingerprint="def").key != RECORD.key


@given(st.dictionaries(NAMES, SCALARS, max_size=5))
def test_frozen_map_is_a_hashable_mapping(entries: dict[str, Any]) -> None:
    frozen = FrozenMap(entries)
    backwards: FrozenMap[Any] = FrozenMap(dict(reversed(list(entries.items()))))
    assert frozen == entries == dict(frozen)
    assert (frozen, hash(frozen), repr(frozen)) == (backwards, hash(backwards), repr(backwards))
    assert list(frozen) == sorted(entries)
    assert len(frozen) == len(entries)


def test_frozen_map_cannot_be_changed_and_does_not_follow_its_source() -> None:
    source = {"M": 1}
    frozen = FrozenMap(source)
    source["M"] = 2
    assert frozen["M"] == 1
    with pytest.raises(TypeError):
        frozen["M"] = 3  # type: ignore[index]
    assert frozen != [("M", 1)]
    assert FrozenMap() == FrozenMap(None) == {}


@pytest.mark.parametrize("value", GOLDEN_KEYS.values(), ids=lambda value: type(value).__name__)
def test_unknown_fields_are_told(value: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(value).__name__} has no field colour; it has "):
        type(value).from_json({**value.to_json(), "colour": "red"})


@pytest.mark.parametrize("value", GOLDEN_KEYS.values(), ids=lambda value: type(value).__name__)
def test_fields_cannot_be_set(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, "other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dims": {"M": -1}}, "dimension M must be a whole number of 0 or more, got -1"),
        ({"dims": {"M": True}}, "dimension M"),
        ({"dims": {"M": 1.5}}, "dimension M"),
        ({"dtypes": {"a": "fp17"}}, "dtype of a must be one of fp64.*got 'fp17'"),
        ({"error_budget": 0.0}, "error_budget must lie between 0 and 1, got 0.0"),
        ({"error_budget": math.nan}, "error_budget"),
    ],
)
def test_impossible_workloads_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload.from_json({**WORKLOAD.to_json(), **change})


def test_a_time_is_given_exactly_when_the_status_is_ok() -> None:
    with pytest.raises(ValueError, match="median_us must be given exactly"):
        Measurement(Status.OK)
    with pytest.raises(ValueError, match="median_us must be given exactly"):
        Measurement(Status.TIMEOUT, 1.0)
    with pytest.raises(ValueError, match="fast"):
        Measurement.from_json({"status": "fast", "median_us": 1.0})


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_json_does_not_have_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        dataclasses.replace(MEASUREMENT, error=number).to_json()
    with pytest.raises(ValueError):
        canonical_json({"x": number})


def test_a_record_needs_a_time() -> None:
    with pytest.raises(ValueError, match="needs a measurement that is ok, got timeout"):
        dataclasses.replace(RECORD, measurement=Measurement(Status.TIMEOUT))


@pytest.mark.parametrize(
    ("vendor_us", "speedup", "winner"),
    [(14.0, 1.12, "kernel"), (12.6, 1.008, "vendor"), (10.0, 0.8, "vendor"), (None, None, "kernel")],
)
def test_the_vendor_wins_ties(vendor_us: float | None, speedup: float | None, winner: str) -> None:
    record = dataclasses.replace(RECORD, vendor_us=vendor_us)
    assert record.speedup == (None if speedup is None else pytest.approx(speedup))
    assert record.winner == winner


def test_digest_is_sha256_of_canonical_json() -> None:
    assert canonical_json({"b": 1, "a": [True, "é"]}) == '{"a":[true,"\\u00e9"],"b":1}'
    assert digest([]) == "4f53cda18c2baa0c0354"
    assert len(digest({}, 32)) == 32


def test_words_for_people() -> None:
    assert str(WORKLOAD) == "matmul[K=512,M=128,N=256] bf16 a:row,b:col,out:row+bias+gelu error<=0.001"
    assert str(SCHEDULE) == "pointer(block_m=64, precision=bf16)"
