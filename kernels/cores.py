"""How many cores this process may use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

FILES = 5
"""Open files that a child process takes: three pipes, what it prints to, its exit code."""

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """The cores that this process may run on, at most the share that its container has; a machine may have more."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 1
    return max(1, min(cores, _quota() or cores))


def compilers() -> int:
    """Compilers to start where nobody says how many: a core is left to whoever measures, and half of the files that may
    be open to everything else."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = usable_cores() if files == resource.RLIM_INFINITY else files // (2 * FILES)
    return max(1, min(usable_cores() - 1, most))


def _quota() -> int | None:
    """Cores' worth of time that the container has, rounded up; None for any number."""
    try:
        allowed, period = _QUOTA.read_text(encoding="ascii").split()
        return -(-int(allowed) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
