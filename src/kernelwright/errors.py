"""Every error that Kernelwright raises on purpose.

KernelwrightError
 ├── UsageError                    the caller asked for something that cannot be
 │    ├── UnknownOperator          no operator of that name
 │    ├── UnknownDevice            no GPU of that name, or none in this machine
 │    ├── UnknownStrategy          no search strategy of that name
 │    ├── InvalidWorkload          shape, layout or epilogue that the operator cannot have
 │    │    └── UnsupportedDtype    an element type, or a mix of them, that no template computes
 │    ├── IllegalSchedule          a schedule that breaks a named constraint of the space
 │    └── NothingRecorded          a replay device holds no trials of that workload
 ├── MissingDependency             an optional package is needed for this; says which extra brings it
 ├── BuildFailed                   the compiler refused a schedule, or died on it
 │    └── OutOfResources           more shared memory, registers or threads than the device has
 ├── NoWorkingSchedule             every schedule tried on a workload failed
 ├── DeviceLost                    a device of a fleet went away or stopped answering, or none of them is left
 ├── DatabaseError
 │    ├── DatabaseUnavailable      cannot be opened, read or written
 │    ├── DatabaseTooNew           written by a later release
 │    └── DatabaseTooOld           must be upgraded first
 ├── ArchiveError                  a file to import is damaged, of a later version, or not ours
 ├── ModelMismatch                 a cost model made for other features or another operator
 └── ServiceError                  the service did not answer, or answered with an error

Messages say what was wanted, what came, and what to try.
"""

from __future__ import annotations


class KernelwrightError(Exception):
    """Base of all of them."""


class UsageError(KernelwrightError):
    """The caller asked for something that cannot be."""


class UnknownOperator(UsageError):
    """No operator of that name."""


class UnknownDevice(UsageError):
    """No GPU of that name, or none in this machine."""


class UnknownStrategy(UsageError):
    """No search strategy of that name."""


class InvalidWorkload(UsageError):
    """A shape, layout or epilogue that the operator cannot have."""


class UnsupportedDtype(InvalidWorkload):
    """An element type, or a mix of them, that no template computes."""


class IllegalSchedule(UsageError):
    """A schedule that breaks a named constraint of the space."""


class NothingRecorded(UsageError):
    """A replay device holds no trials of that workload."""


class MissingDependency(KernelwrightError):
    """An optional package is needed; the message names the extra that brings it."""


class BuildFailed(KernelwrightError):
    """The compiler refused a schedule, or died on it."""


class OutOfResources(BuildFailed):
    """More shared memory, registers or threads than the device has."""


class NoWorkingSchedule(KernelwrightError):
    """Every schedule tried on a workload failed."""


class DeviceLost(KernelwrightError):
    """A device of a fleet went away or stopped answering, or none of them is left."""


class DatabaseError(KernelwrightError):
    """Something about the database."""


class DatabaseUnavailable(DatabaseError):
    """Cannot be opened, read or written."""


class DatabaseTooNew(DatabaseError):
    """Written by a later release."""


class DatabaseTooOld(DatabaseError):
    """Must be upgraded first."""


class ArchiveError(KernelwrightError):
    """A file to import is damaged, of a later version, or not ours."""


class ModelMismatch(KernelwrightError):
    """A cost model made for other features or another operator."""


class ServiceError(KernelwrightError):
    """The service did not answer, or answered with an error."""
