"""The error for an id that leads nowhere."""

from __future__ import annotations

from kernelwright.errors import UsageError


class NotFound(UsageError):
    """No record or job of that id, or no kernel to show."""
