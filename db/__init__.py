"""What Kernelwright remembers: trials, winners and jobs, in SQLite or PostgreSQL."""

from kernelwright.db.access_store import ApiKey, AuditEntry
from kernelwright.db.archive import export_archive, import_archive
from kernelwright.db.engine import default_url, open_engine, upgrade
from kernelwright.db.jobs import Job, JobRequest, JobState
from kernelwright.db.retention import Pruned, prune
from kernelwright.db.store import Store
from kernelwright.db.trial_store import StoredTrial
from kernelwright.db.trust import RecordState, Trust

__all__ = [
    "ApiKey",
    "AuditEntry",
    "Job",
    "JobRequest",
    "JobState",
    "Pruned",
    "RecordState",
    "Store",
    "StoredTrial",
    "Trust",
    "default_url",
    "export_archive",
    "import_archive",
    "open_engine",
    "prune",
    "upgrade",
]
