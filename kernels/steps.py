"""Where the seconds go: what takes time is told to the log, at DEBUG, with when it began and when it ended.

The logger is "kernelwright.steps"; the message of each record is a `Step`. Steps of child processes are told by their
parent, as they were, once the child answers. While nobody listens, nothing is collected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Iterator

logger = logging.getLogger("kernelwright.steps")


@dataclasses.dataclass(frozen=True)
class Step:
    """What a process did between two readings of `time.monotonic`, the same clock in all processes of a machine."""

    name: str
    began: float
    ended: float
    process: int

    def __str__(self) -> str:
        return f"{self.name}: {self.ended - self.began:.3f} s in process {self.process}"


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Tell how long what is done inside takes, also when it fails."""
    began = time.monotonic()
    try:
        yield
    finally:
        if listening():
            tell([Step(name, began, time.monotonic(), os.getpid())])


def tell(steps: Iterable[Step]) -> None:
    """Log steps as they are."""
    for one in steps:
        logger.debug(one)


def listening() -> bool:
    """Whether anybody wants to know."""
    return logger.isEnabledFor(logging.DEBUG)


class Collector(logging.Handler):
    """Keeps the steps that are told while it is attached."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._steps: list[Step] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        if isinstance(record.msg, Step):
            self._steps.append(record.msg)

    def attach(self) -> Collector:
        """Listen from now on, in this process."""
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)
        return self

    def detach(self) -> None:
        """Listen no longer."""
        logger.removeHandler(self)
        logger.setLevel(logging.NOTSET)

    def take(self) -> list[Step]:
        """The steps since the last call."""
        taken, self._steps = self._steps, []
        return taken
