"""A large database for load tests: as many winners of matmuls on an H100, and trials of each, as are asked for."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from sqlalchemy import func, insert, select, text

from kernelwright.db import Store
from kernelwright.db.engine import session_scope
from kernelwright.db.rows import Parts, insert_new, record_row
from kernelwright.db.tables import RecordRow, TrialRow, WorkloadRow
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import Measurement, Schedule, Status, Toolchain, Trial, TuningRecord, Workload

H100 = named_device("h100")
TOOLCHAIN = Toolchain("3.6.0", "2.11.0+cu130", "580.159.04", "ptxas 12.8.93", 1)
MOMENT = "2026-01-01T00:00:00+00:00"

MS = (1, *(size for power in range(1, 14) for size in (2**power, 3 * 2 ** (power - 1))))
PAGE = 1000


@dataclasses.dataclass(frozen=True)
class Size:
    """How much to fill in."""

    winners: int = 20_000
    trials: int = 1_000_000


def shapes(count: int) -> list[str]:
    """Distinct shapes, spread over the sizes that models have."""
    side = 1
    while len(MS) * side * side < count:
        side += 1
    every = itertools.product(MS, range(1, side + 1), range(1, side + 1))
    return [f"M={m},N={512 * n},K={256 * k}" for m, n, k in itertools.islice(every, count)]


def fill(store: Store, size: Size) -> None:
    """Fill an empty store; rows are what the store itself would write, but for the keys of the copied trials."""
    operator = get_operator("matmul")
    known = [_workload(shape) for shape in shapes(size.winners)]
    tried = operator.space(known[-1], H100).sample(random.Random(0), size.trials // size.winners)
    fingerprints = {name: template.fingerprint for name, template in operator.templates.items()}
    records = (_record(workload, tried[0], fingerprints) for workload in known)
    while page := list(itertools.islice(records, PAGE)):
        _put(store, page)
    store.add_trials(_trials(known[-1], tried, fingerprints))
    _copy_trials(store, known[-1].key)


def _workload(shape: str) -> Workload:
    sizes = dict(part.split("=") for part in shape.split(","))
    return matmul_workload(int(sizes["M"]), int(sizes["N"]), int(sizes["K"]))


def _record(workload: Workload, schedule: Schedule, fingerprints: dict[str, str]) -> TuningRecord:
    time_us = 5.0 + workload.dims["M"] * workload.dims["N"] * workload.dims["K"] * 2 / 6e8
    seen = Measurement(Status.OK, round(time_us, 3), error=0.00166, registers=128, spills=0, shared_bytes=98304)
    return TuningRecord(
        workload, H100, TOOLCHAIN, schedule, seen, fingerprints[schedule.template], "load", MOMENT,
        vendor="torch.mm", vendor_us=round(time_us * 1.1, 3), roofline=0.6, trials=50,
    )  # fmt: skip


def _trials(workload: Workload, tried: Sequence[Schedule], fingerprints: dict[str, str]) -> Iterator[Trial]:
    for number, schedule in enumerate(tried):
        seen = Measurement(Status.OK, 50.0 + number, error=0.00166, registers=128, spills=0, shared_bytes=98304)
        yield Trial(workload, H100, TOOLCHAIN, schedule, seen, "load", fingerprints[schedule.template], MOMENT)


def _put(store: Store, records: Sequence[TuningRecord]) -> None:
    parts = Parts()
    rows = [record_row(record, parts) for record in records]
    with session_scope(store.engine, write=True) as session:
        parts.save(session)
        insert_new(session, RecordRow, rows)


def _copy_trials(store: Store, source: str) -> None:
    """The trials of one workload for every other one, by the database alone."""
    names = [column.name for column in TrialRow.__table__.columns if column.name != "id"]
    theirs = {
        "key": func.substr(WorkloadRow.key, 1, 12).concat(func.substr(TrialRow.key, 1, 8)),
        "workload_key": WorkloadRow.key,
    }
    columns = [theirs.get(name, getattr(TrialRow, name)) for name in names]
    copies = select(*columns).join(WorkloadRow, WorkloadRow.key != source).where(TrialRow.workload_key == source)
    with session_scope(store.engine, write=True) as session:
        session.execute(insert(TrialRow).from_select(names, copies))
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
