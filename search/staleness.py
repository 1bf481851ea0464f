"""Why a stored time may no longer hold: which part of what it was measured with is another one now."""

from __future__ import annotations

from collections.abc import Mapping

from kernelwright.types import Toolchain, TuningRecord

PARTS = ("triton", "compiler", "driver", "torch", "timer")
"""The parts of a toolchain, those that change a time most first."""

UNTRUSTED = "imported without a valid signature and not measured here yet"


def differences(
    record: TuningRecord, toolchain: Toolchain | None, fingerprints: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """What differs between a record and now, by part: (as it was measured, as it is).

    Parts are those of PARTS and "template". toolchain: the one now, None leaves it out. fingerprints: digest of each
    template's source now; one that is gone is "". Empty when the record is current.
    """
    found = {}
    if toolchain is not None:
        for name in PARTS:
            then, now = str(getattr(record.toolchain, name)), str(getattr(toolchain, name))
            if then != now:
                found[name] = (then, now)
    then, now = record.template_fingerprint, fingerprints.get(record.schedule.template, "")
    if then != now:
        found["template"] = (then, now)
    return found


def why_stale(record: TuningRecord, toolchain: Toolchain | None, fingerprints: Mapping[str, str]) -> str:
    """The differences in words, such as "measured with triton 3.6.0 (now 3.7.1)"; "" for a current record."""
    found = differences(record, toolchain, fingerprints)
    told = [f"{_name(part)}{then} (now {now})" for part, (then, now) in found.items() if part != "template"]
    if "template" in found:
        gone = "" if found["template"][1] else ", which this release does not have"
        told.append(f"another source of the template {record.schedule.template}{gone}")
    return f"measured with {', '.join(told)}" if told else ""


def _name(part: str) -> str:
    return "" if part == "compiler" else "timing protocol " if part == "timer" else f"{part} "
