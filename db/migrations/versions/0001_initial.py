"""The first schema: workloads, devices, toolchains, jobs, trials, records."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KEY = sa.String(20)


def upgrade() -> None:
    """Create all tables in an empty database."""
    _create_parts()
    _create_jobs()
    _create_trials()
    _create_records()


def _create_parts() -> None:
    op.create_table(
        "workloads",
        sa.Column("key", KEY, nullable=False),
        sa.Column("operator", sa.Text(), nullable=False),
        sa.Column("dims", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_workloads"),
    )
    op.create_table(
        "devices",
        sa.Column("id", KEY, nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
    )
    op.create_index("ix_devices_key", "devices", ["key"])
    op.create_table(
        "toolchains",
        sa.Column("key", KEY, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_toolchains"),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", SERIAL, autoincrement=True, nullable=False),
        sa.Column("id", KEY, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("workload_key", KEY, nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("strategy", sa.Text(), nullable=False),
        sa.Column("trials", sa.BigInteger()),
        sa.Column("seconds", sa.Double()),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("heartbeat_at", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("record_id", KEY),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger()),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.ForeignKeyConstraint(["workload_key"], ["workloads.key"], name="fk_jobs_workload_key"),
    )
    op.create_index("ix_jobs_state_number", "jobs", ["state", "number"])


def _create_trials() -> None:
    op.create_table(
        "trials",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("workload_key", KEY, nullable=False),
        sa.Column("device_id", KEY, nullable=False),
        sa.Column("device_key", KEY, nullable=False),
        sa.Column("toolchain_key", KEY, nullable=False),
        sa.Column("operator", sa.Text(), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("median_us", sa.Double()),
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("measurement", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("template_fingerprint", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.Text(), nullable=False),
        sa.Column("job_id", KEY),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.UniqueConstraint("key", name="uq_trials_key"),
        *_parts_of("trials"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_trials_job_id"),
    )
    place = ["workload_key", "device_key", "toolchain_key", "status", "median_us"]
    op.create_index("ix_trials_place", "trials", place)
    op.create_index("ix_trials_operator_device_key", "trials", ["operator", "device_key"])
    op.create_index("ix_trials_job_id", "trials", ["job_id"])


def _create_records() -> None:
    op.create_table(
        "records",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("workload_key", KEY, nullable=False),
        sa.Column("device_id", KEY, nullable=False),
        sa.Column("device_key", KEY, nullable=False),
        sa.Column("toolchain_key", KEY, nullable=False),
        sa.Column("operator", sa.Text(), nullable=False),
        sa.Column("family", KEY, nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_records"),
        sa.UniqueConstraint("key", name="uq_records_key"),
        *_parts_of("records"),
    )
    op.create_index("ix_records_place", "records", ["workload_key", "device_key", "created"])
    op.create_index("ix_records_family", "records", ["family", "device_key", "created"])
    op.create_index("ix_records_operator", "records", ["operator", "device_key", "created"])
    op.create_index("ix_records_created", "records", ["created"])


def _parts_of(table: str) -> list[sa.ForeignKeyConstraint]:
    return [
        sa.ForeignKeyConstraint(["workload_key"], ["workloads.key"], name=f"fk_{table}_workload_key"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=f"fk_{table}_device_id"),
        sa.ForeignKeyConstraint(["toolchain_key"], ["toolchains.key"], name=f"fk_{table}_toolchain_key"),
    ]
