"""Two ranks of a job put the same kernels into their graphs, whatever one of them fails at."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kernelwright.compiler.dispatch import local_answers
from kernelwright.compiler.passes.replace import Replace
from kernelwright.db import Store
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.pieces import PieceTimes
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import TuningRecord, Workload
from tests.compiler.rank_of_job import REDUCED, graph_of

FAILURES = ("missing", "broken", "too old", "locked", "no records", "no pieces", "no service")
ROWS = 64

Maker = Callable[..., TuningRecord]


def spoil(path: Path, failure: str) -> None:
    """Make a database fail as its name says; a lock is taken later."""
    commands = {
        "too old": "UPDATE kernelwright_schema SET version_num = '0001'",
        "no records": "ALTER TABLE records RENAME TO gone",
        "no pieces": "ALTER TABLE pieces RENAME TO gone",
    }
    if failure == "missing":
        path.unlink()
    elif failure == "broken":
        path.write_bytes(b"this is not a database" * 1000)
    elif failure in commands:
        with closing(sqlite3.connect(path)) as database:
            database.execute(commands[failure])
            database.commit()


def _workload(rows: int, steps: tuple[str, ...]) -> Workload:
    return matmul_workload(rows, 256, REDUCED, "fp32", "nn", epilogue=steps)


class Cases:
    """Cases of `rank_of_job`, each with a product of its own; rank 1 fails."""

    def __init__(self, folder: Path, record_of: Maker, two_ranks: Callable[..., list[Any]]) -> None:
        self._folder, self._record_of, self._two_ranks = folder, record_of, two_ranks
        self.failures: list[str] = []
        self.cases: list[dict[str, Any]] = []

    def add(self, failure: str, first: int | None, patience: float = 0.0) -> None:
        """A case on databases that `run` makes."""
        service = failure == "no service"
        paths = [self._folder / f"{len(self.cases)}-{rank}.db" for rank in range(2)]
        self.failures.append(failure)
        self.cases.append(
            {
                "rows": ROWS * (1 + len(self.cases)),
                "first": first,
                "patience": patience,
                "databases": [f"sqlite:///{path}" for path in paths],
                "locked": 1 if failure == "locked" else None,
                "url": "http://127.0.0.1:9" if service else None,
                "served": [0] if service else [],
                "served_from": f"sqlite:///{self._folder / 'all.db'}",
            }
        )

    def _fill(self) -> None:
        """Records by which our kernels are faster and, where times of pieces are at stake, such by which not."""
        url = f"sqlite:///{self._folder / 'all.db'}"
        with Store.open(url) as store:
            for case in self.cases:
                for steps in ((), ("relu",)):
                    store.put_winner(self._record_of(_workload(case["rows"], steps)))
            judge = Replace(local_answers(url, "h100"), devices=("cpu",))
            for case, failure in zip(self.cases, self.failures, strict=True):
                if failure == "no pieces":
                    (wanted,) = judge.pieces(graph_of(case["rows"]))
                    place = (wanted.piece.key, named_device("h100").key, current_toolchain(TIMER_VERSION).key)
                    slower = dict.fromkeys(wanted.options, 90.0)
                    store.put_piece(PieceTimes(*place, str(wanted.piece), 10.0, slower, {}, 0.01))

    def _share(self) -> None:
        """Give each rank its database of each case; no two cases know the same."""
        for case, failure in zip(self.cases, self.failures, strict=True):
            first, second = (Path(url.removeprefix("sqlite:///")) for url in case["databases"])
            if failure == "no service":
                continue
            shutil.copy(self._folder / "all.db", first)
            with closing(sqlite3.connect(first)) as database:
                database.execute("UPDATE pieces SET body = json_set(body, '$.text', ?)", [str(case["rows"])])
                database.commit()
            shutil.copy(first, second)
            spoil(second, failure)

    def run(self) -> list[list[dict[str, Any]]]:
        """What each of the ranks says of each case."""
        self._fill()
        self._share()
        (self._folder / "cases.json").write_text(json.dumps(self.cases), encoding="utf-8")
        return self._two_ranks("rank_of_job:start", folder=str(self._folder))


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory, record_of: Maker, two_ranks: Callable[..., list[Any]]
) -> tuple[Cases, list[list[dict[str, Any]]]]:
    """All cases, run by one job: in turns, and at once."""
    cases = Cases(tmp_path_factory.mktemp("ranks"), record_of, two_ranks)
    for failure in ("nothing", *FAILURES):
        for first in (0, 1):
            cases.add(failure, first)
    cases.add("nothing", None, patience=120.0)
    for failure in ("missing", "no pieces", "no service"):
        cases.add(failure, None, patience=0.5)
    return cases, cases.run()


def test_ranks_agree_whatever_one_of_them_fails_at(job: tuple[Cases, list[list[dict[str, Any]]]]) -> None:
    cases, ranks = job
    assert [len(said) for said in ranks] == [len(cases.cases)] * 2
    for failure, case, one, other in zip(cases.failures, cases.cases, *ranks, strict=True):
        told = f"{failure}, rank {case['first']} first: {one}, {other}"
        assert one["replaced"] == other["replaced"], told
        # who knows nothing takes part all the same, and says why
        explains = failure not in ("nothing", "no pieces", "no service")
        assert [len(each["warnings"]) for each in (one, other)] == [0, int(explains)], told
        if case["first"] is not None:
            knows_first = failure == "nothing" or case["first"] == 0
            # by the times of pieces ours is slower, and who has no pieces to read knows only records
            assert len(one["replaced"]) == int(knows_first != (failure == "no pieces")), told


def test_graphs_are_kept_where_all_ranks_know_the_same(job: tuple[Cases, list[list[dict[str, Any]]]]) -> None:
    """A graph out of the cache was decided by what one rank knew, and asks nobody."""
    cases, ranks = job
    for failure, case, *both in zip(cases.failures, cases.cases, *ranks, strict=True):
        if case["first"] is None:
            assert [each["kept"] for each in both] == [failure == "nothing"] * 2, failure
