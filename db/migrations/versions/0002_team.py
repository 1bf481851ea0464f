"""A database for a team: trust and provenance, places of sizes, uses, API keys, audit log, idempotent jobs."""

import itertools
import json
import math

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KEY = sa.String(20)


def upgrade() -> None:
    """Add columns and tables; what the new columns of old rows hold is worked out from the rows."""
    op.add_column("jobs", sa.Column("idempotency_key", sa.Text()))
    op.create_index("ix_jobs_idempotency_key", "jobs", ["idempotency_key"], unique=True)
    _extend_trials()
    _extend_records()
    _create_tables()


def _extend_trials() -> None:
    op.add_column("trials", sa.Column("error", sa.Double()))
    op.add_column("trials", _text("trust", "measured"))
    op.add_column("trials", _text("source", ""))
    if op.get_bind().dialect.name == "postgresql":
        # As text: a message before PostgreSQL's own JSON reader may hold escapes that it refuses.
        found = "CAST(substring(measurement from '\"error\":([-+0-9.eE]+)') AS double precision)"
    else:
        found = "json_extract(measurement, '$.error')"
    op.execute(f"UPDATE trials SET error = {found} WHERE status = 'ok'")
    op.drop_index("ix_trials_operator_device_key", "trials")
    op.drop_index("ix_trials_job_id", "trials")
    op.create_index("ix_trials_operator", "trials", ["operator", "device_key", "id"])
    op.create_index("ix_trials_job", "trials", ["job_id", "id"])


def _extend_records() -> None:
    op.add_column("records", sa.Column("place", sa.BigInteger(), server_default="0", nullable=False))
    for name, default in (("template", ""), ("template_fingerprint", ""), ("trust", "measured")):
        op.add_column("records", _text(name, default))
    op.add_column("records", _text("source", ""))
    op.add_column("records", _text("reason", ""))
    _fill_records()
    op.drop_index("ix_records_family", "records")
    op.create_index("ix_records_near", "records", ["family", "device_key", "place"])


def _fill_records() -> None:
    connection = op.get_bind()
    query = "SELECT r.id, r.body, w.dims FROM records r JOIN workloads w ON w.key = r.workload_key ORDER BY r.id"
    found = iter(connection.execute(sa.text(query)).all())
    change = sa.text(
        "UPDATE records SET place = :place, template = :template, template_fingerprint = :fingerprint WHERE id = :id"
    )
    while page := list(itertools.islice(found, 500)):
        connection.execute(change, [_filled(*row) for row in page])


def _filled(row_id: int, body: str, dims: str) -> dict[str, object]:
    record = json.loads(body)
    fingerprint, template = record["template_fingerprint"], record["schedule"]["template"]
    return {"id": row_id, "place": _place(json.loads(dims)), "template": template, "fingerprint": fingerprint}


def _place(dims: dict[str, int]) -> int:
    # As kernelwright.db.places had it when this revision was made.
    steps = [min(int(math.log2(max(dims[name], 1)) * 64), 4095) for name in sorted(dims)[:5]]
    out = 0
    for bit in range(11, -1, -1):
        for step in steps:
            out = out << 1 | (step >> bit & 1)
    return out


def _create_tables() -> None:
    op.create_table(
        "uses",
        sa.Column("record_key", KEY, nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("last_used", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("record_key", name="pk_uses"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", KEY, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("hash", name="uq_api_keys_hash"),
    )
    op.create_table(
        "audit",
        sa.Column("id", SERIAL, autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )


def _text(name: str, default: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=default or sa.text("''"), nullable=False)
