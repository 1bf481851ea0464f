"""Every way in which building or running a schedule can fail, sorted in one place."""

from __future__ import annotations

from kernelwright.errors import BuildFailed, OutOfResources
from kernelwright.types import Measurement, Status

MESSAGE_LENGTH = 500

_STICKY = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "illegal instruction",
    "device-side assert",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable",
)
"""CUDA errors after which every further call in the process fails: the process must be replaced."""

_RESOURCES = ("out of resource", "out of memory", "too many resources", "invalid argument")


def poisons_process(error: BaseException) -> bool:
    """Whether the process that raised this can no longer be trusted with the GPU."""
    words = str(error).lower()
    return any(sign in words for sign in _STICKY)


def classify(error: BaseException) -> Status:
    """The status of a trial that ended with this exception."""
    words = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, BuildFailed) and "was stopped after" in words:
        return Status.TIMEOUT
    if poisons_process(error):
        return Status.CRASHED
    if isinstance(error, OutOfResources) or any(sign in words for sign in _RESOURCES) or "outofresources" in words:
        return Status.OUT_OF_RESOURCES
    if isinstance(error, BuildFailed) or any(s in words for s in ("compil", "passmanager", "ptxas", "mlir", "triton")):
        return Status.BUILD_ERROR
    return Status.CRASHED


def failed(status: Status, message: str) -> Measurement:
    """A measurement that holds why it failed, in at most MESSAGE_LENGTH characters (the end is kept)."""
    words = message.strip()
    short = words if len(words) <= MESSAGE_LENGTH else "..." + words[-MESSAGE_LENGTH:]
    return Measurement(status, message=short)


def failure_of(error: BaseException) -> Measurement:
    """The measurement of a trial that ended with this exception."""
    return failed(classify(error), f"{type(error).__name__}: {error}")
