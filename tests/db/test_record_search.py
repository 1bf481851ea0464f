"""Looking through records on both databases: the same filters find the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from kernelwright.db import Store
from kernelwright.db.record_search import RecordFilter, devices_of_records, search_records
from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import FrozenMap, Measurement, Schedule, Status, Toolchain, TuningRecord, Workload

H100, A100 = named_device("h100"), named_device("a100")


def record(workload: Workload, time_us: float, vendor_us: float | None = 100.0, **changes: object) -> TuningRecord:
    made = TuningRecord(
        workload,
        H100,
        Toolchain("3.6.0", "2.11.0", "580", "ptxas 12.8", 1),
        Schedule("pointer", FrozenMap({"block_m": 64})),
        Measurement(Status.OK, time_us),
        template_fingerprint="f",
        origin="tune",
        created_at=f"2026-01-01T00:00:{int(time_us) % 60:02d}+00:00",
        vendor="torch.mm",
        vendor_us=vendor_us,
        roofline=10 / time_us,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


FAST = record(matmul_workload(512, 1024, 256), 50.0)
TIE = record(matmul_workload(512, 1024, 2048, layout="nn"), 99.0)
SLOW = record(matmul_workload(51, 1024, 25, dtype="fp16"), 110.0)
ALONE = record(matmul_workload(512, 2048, 256, dtype="fp16", epilogue=("bias",)), 20.0, None)
ELSEWHERE = record(matmul_workload(512, 1024, 256), 70.0, device=A100)
NOISY = record(matmul_workload(7, 7, 7), 80.0, noise=0.5)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        for one in (FAST, TIE, SLOW, ALONE, ELSEWHERE, NOISY):
            opened.put_winner(one)
        yield opened


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('search') / 'kernelwright.db'}"
    made: str = request.getfixturevalue("postgres")()
    return made


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_filters_orders_and_pages(store: Store) -> None:
    def found(order: str = "newest", **wanted: object) -> list[TuningRecord]:
        return search_records(store.engine, RecordFilter(**wanted), order)[0]  # type: ignore[arg-type]

    assert set(found()) == {FAST, TIE, SLOW, ALONE, ELSEWHERE, NOISY}
    assert set(found(device_key=A100.key)) == {ELSEWHERE}
    assert set(found(dtype="fp16")) == {SLOW, ALONE}
    assert set(found(layouts=FrozenMap({"a": "row", "b": "row"}))) == {TIE}
    assert set(found(dims=FrozenMap({"M": 512, "K": 256}))) == {FAST, ALONE, ELSEWHERE}
    assert set(found(dims=FrozenMap({"K": 25}))) == {SLOW}
    assert found(dtype='fp16",%') == []
    for winner in ("kernel", "vendor"):
        everything = (FAST, TIE, SLOW, ALONE, ELSEWHERE, NOISY)
        assert set(found(winner=winner)) == {one for one in everything if one.winner == winner}
    assert found("speedup")[:3] == [FAST, ELSEWHERE, NOISY]
    assert found("speedup")[-1] == ALONE
    assert found("roofline")[0] == ALONE
    page, total = search_records(store.engine, RecordFilter(device_key=H100.key), "speedup", limit=2, offset=2)
    assert (page, total) == ([TIE, SLOW], 5)
    assert [(device.slug, count) for device, count in devices_of_records(store.engine)] == [("h100", 5), ("a100", 1)]
    with pytest.raises(UsageError, match="order"):
        found("best")
