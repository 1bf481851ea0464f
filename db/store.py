"""The store: trials, records, pieces, jobs, keys and audit log of one database."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from sqlalchemy import Engine

from kernelwright.db.access_store import AccessStore
from kernelwright.db.direct import DirectReads
from kernelwright.db.engine import open_engine
from kernelwright.db.job_store import JobStore
from kernelwright.db.piece_store import PieceStore
from kernelwright.db.record_store import RecordStore
from kernelwright.db.rows import Reader
from kernelwright.db.trial_store import TrialStore
from kernelwright.db.trust_store import TrustStore


class Store(TrialStore, RecordStore, PieceStore, TrustStore, JobStore, AccessStore):
    """Everything that is kept. Safe to share between threads; every process opens its own.

    Each method is one transaction (`add_trials`: one for every page) and raises DatabaseUnavailable when the database
    fails it; what it returns is a frozen value that never touches the database again.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reader = Reader()
        self.direct = DirectReads(engine)

    @classmethod
    def open(cls, url: str | None = None) -> Self:
        """The store at `url`, by default in the user's data directory; raises what `open_engine` does."""
        return cls(open_engine(url))

    def close(self) -> None:
        """Give the connections back."""
        self.direct.close()
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
