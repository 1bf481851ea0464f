"""The tables. Rows never leave this folder: the store hands out frozen values.

Workloads, devices and toolchains are stored once and named by digest. Values are canonical JSON in text columns, which
gives back the very value on both databases; what is searched by stands beside it in columns of its own. Moments are
Unix seconds, taken from the database's clock, so that machines with wrong clocks agree.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Double, ForeignKey, Index, Integer, MetaData, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedColumn, mapped_column

# SQLite numbers rows by itself only in a column of type INTEGER.
Serial = BigInteger().with_variant(Integer, "sqlite")
Key = String(20)


def _text(default: str) -> MappedColumn[str]:
    """A text that rows of an earlier schema got by default."""
    # Alembic cannot compare an empty default that is given as a string.
    return mapped_column(Text, server_default=default or text("''"))


class Base(DeclarativeBase):
    """Names every constraint, so that a migration can find it on both databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class WorkloadRow(Base):
    """A workload, by its key. dims: the sizes as JSON, for distances."""

    __tablename__ = "workloads"

    key: Mapped[str] = mapped_column(Key, primary_key=True)
    operator: Mapped[str] = mapped_column(Text)
    dims: Mapped[str] = mapped_column(Text)
    body: Mapped[str] = mapped_column(Text)


class DeviceRow(Base):
    """A device. id: digest of every field; key: of those that change the winner, which several rows may share."""

    __tablename__ = "devices"

    id: Mapped[str] = mapped_column(Key, primary_key=True)
    key: Mapped[str] = mapped_column(Key, index=True)
    slug: Mapped[str] = mapped_column(Text)
    body: Mapped[str] = mapped_column(Text)


class ToolchainRow(Base):
    """A toolchain, by its key."""

    __tablename__ = "toolchains"

    key: Mapped[str] = mapped_column(Key, primary_key=True)
    body: Mapped[str] = mapped_column(Text)


class JobRow(Base):
    """A tuning request and how far it is. number: its place in the queue; attempts: how often it was claimed.

    idempotency_key: what the client named the request by, so that sending it again makes no second job.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_state_number", "state", "number"),
        Index("ix_jobs_idempotency_key", "idempotency_key", unique=True),
    )

    number: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(Key, unique=True)
    state: Mapped[str] = mapped_column(String(16))
    workload_key: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.key))
    device: Mapped[str] = mapped_column(Text)
    strategy: Mapped[str] = mapped_column(Text)
    trials: Mapped[int | None] = mapped_column(BigInteger)
    seconds: Mapped[float | None] = mapped_column(Double)
    seed: Mapped[int] = mapped_column(BigInteger)
    worker: Mapped[str | None] = mapped_column(Text)
    attempts: Mapped[int]
    heartbeat_at: Mapped[float | None] = mapped_column(Double)
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)
    message: Mapped[str] = mapped_column(Text)
    record_id: Mapped[str | None] = mapped_column(Key)
    done: Mapped[int] = mapped_column(BigInteger)
    total: Mapped[int | None] = mapped_column(BigInteger)
    idempotency_key: Mapped[str | None] = mapped_column(Text)


class TrialRow(Base):
    """One trial. device_key repeats the device's key, so that one index answers a search.

    trust: a `Trust`; source: what brought it, "" for this database's own and "import:<file>" for others.
    """

    __tablename__ = "trials"
    __table_args__ = (
        Index("ix_trials_place", "workload_key", "device_key", "toolchain_key", "status", "median_us"),
        Index("ix_trials_job", "job_id", "id"),
        Index("ix_trials_operator", "operator", "device_key", "id"),
    )

    id: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    key: Mapped[str] = mapped_column(Key, unique=True)
    workload_key: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.key))
    device_id: Mapped[str] = mapped_column(ForeignKey(DeviceRow.id))
    device_key: Mapped[str] = mapped_column(Key)
    toolchain_key: Mapped[str] = mapped_column(ForeignKey(ToolchainRow.key))
    operator: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(32))
    median_us: Mapped[float | None] = mapped_column(Double)
    schedule: Mapped[str] = mapped_column(Text)
    measurement: Mapped[str] = mapped_column(Text)
    origin: Mapped[str] = mapped_column(Text)
    template_fingerprint: Mapped[str] = mapped_column(Text)
    measured_at: Mapped[str] = mapped_column(Text)
    job_id: Mapped[str | None] = mapped_column(ForeignKey(JobRow.id))
    error: Mapped[float | None] = mapped_column(Double)
    trust: Mapped[str] = _text("measured")
    source: Mapped[str] = _text("")


class RecordRow(Base):
    """A winner. family: digest of the workload without its sizes; created: its created_at as Unix seconds.

    place: where its sizes lie among those of the family, see `kernelwright.db.places`. trust: a `Trust`; source: what
    brought it, "" for this database's own; reason: why it was put into quarantine.
    """

    __tablename__ = "records"
    __table_args__ = (
        Index("ix_records_place", "workload_key", "device_key", "created"),
        Index("ix_records_near", "family", "device_key", "place"),
        Index("ix_records_operator", "operator", "device_key", "created"),
        Index("ix_records_created", "created"),
    )

    id: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    key: Mapped[str] = mapped_column(Key, unique=True)
    workload_key: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.key))
    device_id: Mapped[str] = mapped_column(ForeignKey(DeviceRow.id))
    device_key: Mapped[str] = mapped_column(Key)
    toolchain_key: Mapped[str] = mapped_column(ForeignKey(ToolchainRow.key))
    operator: Mapped[str] = mapped_column(Text)
    family: Mapped[str] = mapped_column(Key)
    created: Mapped[float] = mapped_column(Double)
    body: Mapped[str] = mapped_column(Text)
    place: Mapped[int] = mapped_column(BigInteger, server_default="0")
    template: Mapped[str] = _text("")
    template_fingerprint: Mapped[str] = _text("")
    trust: Mapped[str] = _text("measured")
    source: Mapped[str] = _text("")
    reason: Mapped[str] = _text("")


class PieceRow(Base):
    """Times of a piece of a graph on one device: what Inductor makes of it, and of it with our kernels.

    key: digest of the piece; body: a `PieceTimes`.
    """

    __tablename__ = "pieces"
    __table_args__ = (Index("ix_pieces_device_key", "device_key", "toolchain_key"),)

    key: Mapped[str] = mapped_column(Key, primary_key=True)
    device_key: Mapped[str] = mapped_column(Key, primary_key=True)
    toolchain_key: Mapped[str] = mapped_column(Key, primary_key=True)
    created_at: Mapped[float] = mapped_column(Double)
    body: Mapped[str] = mapped_column(Text)


class UseRow(Base):
    """How often a record was the answer, so that the most used are measured again first."""

    __tablename__ = "uses"

    record_key: Mapped[str] = mapped_column(Key, primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    last_used: Mapped[float] = mapped_column(Double)


class KeyRow(Base):
    """A key of the API: never the key itself, only its SHA-256 in hex. scopes: separated by spaces."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(Key, primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Double)
    revoked_at: Mapped[float | None] = mapped_column(Double)
    last_used_at: Mapped[float | None] = mapped_column(Double)


class AuditRow(Base):
    """Who did what, and when. who: the id of an API key, or "open" where none is asked for."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Double)
    who: Mapped[str] = mapped_column(Text)
    action: Mapped[str] = mapped_column(Text)
    subject: Mapped[str] = mapped_column(Text)
    detail: Mapped[str] = mapped_column(Text)
