"""What every search space must keep; a test class supplies the fixture `space`."""

from __future__ import annotations

import math
import random

from kernelwright.kernels.space import Space
from kernelwright.types import Schedule


class SpaceContract:
    """Subclasses give the fixtures space (of 8 members or more) and twin (another object made the same way)."""

    def test_members_are_listed_once_in_a_fixed_order(self, space: Space, twin: Space) -> None:
        members = list(space)
        assert len(members) == len(space) == len(set(members)) >= 8
        assert members == list(space) == list(twin)

    def test_members_are_legal_and_strangers_are_not(self, space: Space) -> None:
        for member in space:
            assert space.contains(member)
            assert space.why_illegal(member) == ()
        member = next(iter(space))
        strangers = (
            Schedule("nobody", member.knobs),
            Schedule(member.template, {**member.knobs, "colour": "red"}),  # type: ignore[arg-type]
            Schedule(member.template),
        )
        for stranger in strangers:
            assert not space.contains(stranger)
            assert all(": " in reason for reason in space.why_illegal(stranger))
            assert space.why_illegal(stranger)

    def test_fingerprint_is_that_of_an_equal_space(self, space: Space, twin: Space) -> None:
        assert space.fingerprint == twin.fingerprint
        assert len(space.fingerprint) >= 16

    def test_samples_are_different_members_and_follow_the_seed(self, space: Space) -> None:
        sample = space.sample(random.Random(1), 5)
        assert len(sample) == len(set(sample)) == 5
        assert all(space.contains(schedule) for schedule in sample)
        assert sample == space.sample(random.Random(1), 5)
        assert any(sample != space.sample(random.Random(seed), 5) for seed in range(2, 6))

    def test_asking_for_more_than_there_is_gives_all(self, space: Space) -> None:
        assert set(space.sample(random.Random(0), len(space) + 10)) == set(space)
        assert space.sample(random.Random(0), 0) == []

    def test_neighbours_are_members_one_knob_away_and_mutual(self, space: Space) -> None:
        for member in space:
            found = space.neighbours(member)
            assert len(found) == len(set(found))
            for other in found:
                assert space.contains(other)
                assert other.template == member.template
                assert sum(other.knobs[name] != value for name, value in member.knobs.items()) == 1
                assert member in space.neighbours(other)

    def test_encoding_is_finite_and_tells_neighbours_apart(self, space: Space) -> None:
        for member in space:
            code = space.encode(member)
            assert all(math.isfinite(value) for value in code.values())
            assert all(space.encode(other) != code for other in space.neighbours(member))
