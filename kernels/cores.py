"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """The cores that this process may run on, at most the share that its container has; a machine may have more."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 1
    return max(1, min(cores, _quota() or cores))


def compilers() -> int:
    """Compilers to start where nobody says how many: a core is left to whoever measures."""
    return max(1, usable_cores() - 1)


def _quota() -> int | None:
    """Cores' worth of time that the container has, rounded up; None for any number."""
    try:
        allowed, period = _QUOTA.read_text(encoding="ascii").split()
        return -(-int(allowed) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
