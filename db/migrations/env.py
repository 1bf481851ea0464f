"""Run by Alembic, on the connection that `kernelwright.db.schema` hands over; there is no alembic.ini."""

from alembic import context

from kernelwright.db.schema import VERSION_TABLE
from kernelwright.db.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
