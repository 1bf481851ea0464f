"""Values for the tests of the store: a few by hand, and any by hypothesis."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from kernelwright.types import (
    DTYPES,
    DeviceSpec,
    Measurement,
    Schedule,
    Status,
    Toolchain,
    Trial,
    TuningRecord,
    Workload,
)

H100 = DeviceSpec(
    slug="h100",
    name="NVIDIA H100 80GB HBM3",
    vendor="nvidia",
    architecture="sm_90",
    multiprocessors=132,
    shared_memory_bytes=232448,
    l2_bytes=52428800,
    memory_bytes=85520809984,
    bandwidth_gbs=3352.0,
    peak_tflops={"bf16": 989.4, "fp32": 66.9},
)
L4 = dataclasses.replace(H100, slug="l4", name="NVIDIA L4", architecture="sm_89", multiprocessors=58)
TOOLCHAIN = Toolchain(triton="3.7.1", torch="2.13.0", driver="580.82", compiler="ptxas 12.8.93", timer=1)
OLDER_TOOLCHAIN = dataclasses.replace(TOOLCHAIN, triton="3.6.0")


def matmul(m: int = 64, n: int = 4096, k: int = 4096, **changes: Any) -> Workload:
    """A bf16 matmul."""
    values: dict[str, Any] = {
        "operator": "matmul",
        "dims": {"M": m, "N": n, "K": k},
        "dtypes": {"a": "bf16", "b": "bf16", "out": "bf16"},
        "layouts": {"a": "row", "b": "col", "out": "row"},
    }
    return Workload(**(values | changes))


def trial(number: int = 0, *, workload: Workload | None = None, **changes: Any) -> Trial:
    """A trial like no other of another number."""
    values: dict[str, Any] = {
        "workload": workload or matmul(),
        "device": H100,
        "toolchain": TOOLCHAIN,
        "schedule": Schedule("pointer", {"block_m": number, "precision": "bf16"}),
        "measurement": Measurement(Status.OK, median_us=10.0 + number, samples_us=(10.0, 10.5), error=1e-3),
        "origin": "tune",
        "template_fingerprint": "f" * 20,
        "measured_at": "2026-01-02T03:04:05+00:00",
    }
    return Trial(**(values | changes))


def record(workload: Workload | None = None, **changes: Any) -> TuningRecord:
    """A winner."""
    values: dict[str, Any] = {
        "workload": workload or matmul(),
        "device": H100,
        "toolchain": TOOLCHAIN,
        "schedule": Schedule("pointer", {"block_m": 64}),
        "measurement": Measurement(Status.OK, median_us=9.0),
        "template_fingerprint": "f" * 20,
        "origin": "tune",
        "created_at": "2026-01-02T03:04:05+00:00",
        "vendor": "torch.mm",
        "vendor_us": 10.0,
        "trials": 24,
    }
    return TuningRecord(**(values | changes))


# Origins, names and fingerprints are ours; only what a compiler printed may hold any character at all.
names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(st.integers(), finite, st.text(max_size=5), st.booleans())
microseconds = st.floats(min_value=1e-3, max_value=1e9)

workloads = st.builds(
    Workload,
    operator=names,
    dims=st.dictionaries(names, st.integers(min_value=0), max_size=3),
    dtypes=st.dictionaries(names, st.sampled_from(sorted(DTYPES)), max_size=3),
    layouts=st.dictionaries(names, names, max_size=2),
    epilogue=st.lists(names, max_size=2),
    attributes=st.dictionaries(names, scalars, max_size=2),
    error_budget=st.none() | st.floats(min_value=1e-9, max_value=0.5),
)
devices = st.builds(
    DeviceSpec,
    slug=names,
    name=names,
    vendor=names,
    architecture=names,
    multiprocessors=st.integers(0, 4),
    shared_memory_bytes=st.integers(0, 2),
    l2_bytes=st.integers(0, 2),
    memory_bytes=st.integers(0, 2**50),
    bandwidth_gbs=finite,
    peak_tflops=st.dictionaries(names, finite, max_size=2),
    source=names,
)
toolchains = st.builds(Toolchain, names, names, names, names, st.integers(0, 9))
schedules = st.builds(Schedule, names, st.dictionaries(names, scalars, max_size=3))
good_measurements = st.builds(
    Measurement,
    status=st.just(Status.OK),
    median_us=microseconds,
    samples_us=st.lists(microseconds, max_size=3),
    error=st.none() | finite,
    registers=st.none() | st.integers(0, 255),
    spills=st.none() | st.integers(0, 9),
    shared_bytes=st.none() | st.integers(0, 9),
    compile_s=st.none() | finite,
)
failures = st.builds(
    Measurement, status=st.sampled_from([s for s in Status if s is not Status.OK]), message=st.text(max_size=20)
)
trials = st.builds(
    Trial,
    workload=workloads,
    device=devices,
    toolchain=toolchains,
    schedule=schedules,
    measurement=good_measurements | failures,
    origin=names,
    template_fingerprint=names,
    measured_at=names,
)
records = st.builds(
    TuningRecord,
    workload=workloads,
    device=devices,
    toolchain=toolchains,
    schedule=schedules,
    measurement=good_measurements,
    template_fingerprint=names,
    origin=names,
    created_at=st.datetimes().map(lambda moment: moment.isoformat()) | names,
    vendor=names,
    vendor_us=st.none() | microseconds,
    noise=finite,
    aa_ratio=st.none() | finite,
    runner_up=st.none() | schedules,
    runner_up_us=st.none() | microseconds,
    roofline=st.none() | finite,
    trials=st.integers(0, 9),
    space_fingerprint=names,
)
