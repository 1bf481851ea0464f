"""Where the budget goes: to what takes most time and has most to gain, and nowhere when nothing is worth it."""

from __future__ import annotations

import json

import pytest

from kernelwright.errors import UsageError
from kernelwright.search.campaign import FIRST_ROUND, Campaign, Round, Share, Standing, parse_shares
from tests.search.fakes import workload


def standing(calls: float = 1.0, expected_us: float = 100.0, **more: float) -> Standing:
    return Standing(Share(workload(m=int(calls * 64)), calls), expected_us, **more)  # type: ignore[arg-type]


def test_heavy_workloads_go_first_and_each_is_handed_out_once() -> None:
    light, heavy, slow = standing(1), standing(30), standing(2, 1000.0)
    campaign = Campaign([light, slow, heavy], worth=0)
    order = []
    while (chosen := campaign.next(order)) is not None:
        order.append(chosen)
    assert order == [heavy, slow, light]


def test_between_equals_the_one_whose_first_choice_is_doubtful_goes_first() -> None:
    sure, doubtful = standing(regret=0.01), standing(regret=0.3)
    assert Campaign([sure, doubtful]).next() is doubtful


def test_what_was_searched_gives_way_to_what_was_not() -> None:
    searched, fresh = standing(2), standing(1.5)
    searched.take(Round(64, 90.0, 100.0, seconds=8.0))
    assert Campaign([searched, fresh], worth=0).next() is fresh


def test_all_that_are_worth_it_have_a_first_round_before_any_has_a_second() -> None:
    heavy, light, tiny = standing(1000), standing(1), standing(1e-9)
    campaign = Campaign([light, tiny, heavy])
    assert campaign.next() is heavy
    heavy.take(Round(FIRST_ROUND, 50.0, 100.0, seconds=1.0))
    assert campaign.rate(heavy) > campaign.rate(light)
    assert campaign.next() is light
    light.take(Round(FIRST_ROUND, 99.0, 100.0, seconds=1.0))
    assert campaign.next() is heavy


def test_a_gain_in_the_last_round_keeps_a_workload_going() -> None:
    stuck, moving = standing(), standing()
    for one, second in ((stuck, 80.0), (moving, 60.0)):
        one.take(Round(16, 80.0, 100.0, seconds=4.0))
        one.take(Round(32, second, 100.0, seconds=4.0))
    assert Campaign([stuck, moving], worth=0).next() is moving
    assert moving.saved_us == 40.0 and moving.last_gain == pytest.approx(0.25)


def test_a_kernel_far_behind_the_library_is_given_up_before_one_that_is_level() -> None:
    behind, level = standing(), standing()
    behind.take(Round(32, 150.0, 100.0, seconds=4.0))
    level.take(Round(32, 100.0, 100.0, seconds=4.0))
    assert behind.expected_saving_us() < 0.1 * level.expected_saving_us()
    assert behind.now_us == 100.0 and behind.saved_us == 0.0


def test_it_ends_when_nothing_is_worth_a_minute_of_a_device() -> None:
    one = standing(regret=0.02)
    campaign = Campaign([one, standing(1000, most=0)], worth=0.001)
    assert campaign.next() is None
    assert Campaign([one]).next() is one
    for trials in (16, 32, 64, 128, 256, 512, 1024):
        one.take(Round(trials, 50.0, 100.0, seconds=trials / 2))
    assert Campaign([one], worth=0).next() is one
    assert Campaign([one], worth=0.01).next() is None


def test_small_spaces_and_failures_are_left() -> None:
    done, failed = standing(most=20), standing()
    done.take(Round(20, 50.0, 100.0, seconds=1.0))
    failed.failure = "nothing works"
    assert Campaign([done, failed], worth=0).next() is None
    assert standing(most=5).next_trials() == 5 and standing().next_trials() == FIRST_ROUND


def test_what_was_known_before_is_no_time_spent() -> None:
    one = standing()
    one.take(Round(40, 90.0, 100.0))
    assert (one.trials, one.new_trials, one.seconds, one.next_trials()) == (40, 0, 0.0, 80)
    assert Campaign([one]).total_us() == 90.0 and Campaign([one]).started_us() == 100.0


def test_workloads_are_read_with_their_calls() -> None:
    first, second = workload().to_json(), workload(m=64).to_json()
    lines = [{"workload": first, "calls": 32}, second, {"workload": first, "count": 9}]
    text = "\n".join(map(json.dumps, lines))
    assert parse_shares(text) == [Share(workload(), 33), Share(workload(m=64), 1)]
    for bad in ("[]", json.dumps({"workload": first, "calls": 0}), json.dumps({"workload": first, "calls": "x"}), "{"):
        with pytest.raises(UsageError):
            parse_shares(bad)
    with pytest.raises(UsageError, match="worth must be 0 or more"):
        Campaign([], worth=-1)
