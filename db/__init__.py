"""What Kernelwright remembers: trials, winners and jobs, in SQLite or PostgreSQL."""

from kernelwright.db.archive import export_archive, import_archive
from kernelwright.db.engine import default_url, open_engine, upgrade
from kernelwright.db.jobs import Job, JobRequest, JobState
from kernelwright.db.store import Store

__all__ = [
    "Job",
    "JobRequest",
    "JobState",
    "Store",
    "default_url",
    "export_archive",
    "import_archive",
    "open_engine",
    "upgrade",
]
