"""The error for a request that is refused before anybody looks at what it asks."""

from __future__ import annotations

from collections.abc import Mapping

from kernelwright.errors import UsageError


class Refused(UsageError):
    """A request that is not let in. status: of HTTP. headers: go with the answer, such as Retry-After."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
