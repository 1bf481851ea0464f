from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.errors import UsageError
from kernelwright.search.budget import DEFAULT_TRIALS, Budget

limits = st.none() | st.integers(1, 1000)


def test_no_limit_means_the_default_number_of_trials() -> None:
    assert Budget().trial_limit == Budget(patience=5).trial_limit == DEFAULT_TRIALS
    assert Budget(seconds=5).trial_limit is None


@pytest.mark.parametrize("field", ["trials", "seconds", "patience"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_must_be_above_zero(field: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"budget {field} must be above 0, got {value}"):
        Budget(**{field: value})


def test_the_first_limit_reached_ends_it() -> None:
    budget = Budget(trials=10, seconds=5.0, patience=4)
    assert budget.room(0, 0.0, 0) == 4
    assert budget.room(8, 0.0, 0) == 2
    assert budget.room(2, 5.0, 0) == 0
    assert budget.room(5, 0.0, 4) == 0


def test_seconds_alone_leave_any_number_of_trials() -> None:
    assert Budget(seconds=5.0).room(10_000, 4.9, 10_000) is None


@given(trials=limits, seconds=limits, patience=limits, spent=st.integers(0, 2000), since=st.integers(0, 2000))
def test_room_never_goes_beyond_a_limit(
    trials: int | None, seconds: int | None, patience: int | None, spent: int, since: int
) -> None:
    budget = Budget(trials, seconds, patience)
    room = budget.room(spent, 0.0, since)
    if room is None:
        assert budget.trial_limit is None and patience is None
    else:
        assert room >= 0
        assert budget.trial_limit is None or room == 0 or spent + room <= budget.trial_limit
        assert patience is None or room == 0 or since + room <= patience
