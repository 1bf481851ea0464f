"""Pieces of graphs that were timed as a whole, with our kernels in them and without."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

KEY = sa.String(20)


def upgrade() -> None:
    """Add the table of pieces."""
    op.create_table(
        "pieces",
        sa.Column("key", KEY, nullable=False),
        sa.Column("device_key", KEY, nullable=False),
        sa.Column("toolchain_key", KEY, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", "device_key", "toolchain_key", name="pk_pieces"),
    )
    op.create_index("ix_pieces_device_key", "pieces", ["device_key", "toolchain_key"])
