"""Which part of what a record was measured with is another one now."""

from __future__ import annotations

import dataclasses

import pytest

from kernelwright.search.answer import find_winner
from kernelwright.search.staleness import PARTS, differences, why_stale
from kernelwright.types import TuningRecord
from tests.search.fakes import DEVICE, TOOLCHAIN, WORKLOAD
from tests.search.test_answer import MATMUL, Memory, record

PRINTS = {name: template.fingerprint for name, template in MATMUL.templates.items()}


class Shared(Memory):
    """Records that nobody vouches for."""

    def __init__(self, *untrusted: TuningRecord) -> None:
        super().__init__()
        self.untrusted = list(untrusted)

    def find_untrusted(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        return self.untrusted


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_told_apart(part: str) -> None:
    other = dataclasses.replace(TOOLCHAIN, **{part: 0 if part == "timer" else "other"})
    found = record(toolchain=other)
    then, now = str(getattr(other, part)), str(getattr(TOOLCHAIN, part))
    assert differences(found, TOOLCHAIN, PRINTS) == {part: (then, now)}
    assert f"{then} (now {now})" in why_stale(found, TOOLCHAIN, PRINTS)
    assert why_stale(found, None, PRINTS) == ""


def test_the_template_is_told_apart() -> None:
    assert differences(record(fingerprint="old"), TOOLCHAIN, PRINTS) == {"template": ("old", PRINTS["pointer"])}
    assert why_stale(record(fingerprint="old"), TOOLCHAIN, {}).endswith("which this release does not have")
    assert differences(record(), TOOLCHAIN, PRINTS) == {} and why_stale(record(), TOOLCHAIN, PRINTS) == ""


def test_several_parts_are_told_in_one_sentence() -> None:
    other = dataclasses.replace(TOOLCHAIN, triton="3.0", driver="1")
    told = why_stale(record(toolchain=other, fingerprint="old"), TOOLCHAIN, PRINTS)
    assert told == (
        f"measured with triton 3.0 (now {TOOLCHAIN.triton}), driver 1 (now {TOOLCHAIN.driver}), "
        "another source of the template pointer"
    )


def test_an_answer_says_which_part_differs() -> None:
    other = dataclasses.replace(TOOLCHAIN, triton="3.0")
    answer = find_winner(WORKLOAD, DEVICE, Memory(record(toolchain=other)), toolchain=TOOLCHAIN)
    assert answer.how == "stale" and f"triton 3.0 (now {TOOLCHAIN.triton})" in answer.note


def test_what_nobody_vouches_for_is_stale_and_comes_last() -> None:
    answer = find_winner(WORKLOAD, DEVICE, Shared(record()), toolchain=TOOLCHAIN)
    assert answer.how == "stale" and "without a valid signature" in answer.note
    both = Shared(record(us=1.0))
    both.records = [record(us=50.0, fingerprint="old")]
    assert find_winner(WORKLOAD, DEVICE, both, toolchain=TOOLCHAIN).expected_us == 50.0
    both.records = [record(us=50.0)]
    assert find_winner(WORKLOAD, DEVICE, both, toolchain=TOOLCHAIN).how == "measured"
