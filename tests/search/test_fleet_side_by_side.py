"""Several searches on each device of a fleet: it measures for one while compilers work for others; each has a home."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from kernelwright.search.fleet import IDLE
from kernelwright.search.fleet_batch import Built
from kernelwright.search.fleet_runner import FleetRunner, side_by_side
from kernelwright.search.runner import WarmsUp
from kernelwright.types import DeviceSpec, Schedule, Workload
from tests.search.fakes import WORKLOAD, fake_space, workload
from tests.search.fleets import FaultyLink, fleet_of

MEMBERS = list(fake_space())


class SlowBuilders:
    """Compilers that hand out each schedule when told; those of other workloads at once."""

    def __init__(self, slow: Workload) -> None:
        self.slow, self.go, self.warm = slow, threading.Semaphore(0), 0

    def build_all(
        self, workload: Workload, schedules: Sequence[Schedule], device: DeviceSpec, deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Built | Exception]]:
        for schedule in schedules:
            if workload == self.slow:
                self.go.acquire()
            yield schedule, Built(())

    def warm_up(self) -> None:
        self.warm += 1

    def close(self) -> None:
        self.go.release(1000)


def test_a_device_serves_others_while_compilers_work_for_a_search() -> None:
    other = workload(m=64)
    builders, link = SlowBuilders(WORKLOAD), FaultyLink()
    fleet = fleet_of(link)
    slow, quick = (FleetRunner(fleet, "h100", builders=builders) for _ in range(2))
    waiting = slow.measure(WORKLOAD, MEMBERS[:6])
    builders.go.release()
    next(iter(waiting))
    assert len(list(quick.measure(other, MEMBERS[:5]))) == 5
    assert quick.finals(other, MEMBERS[:2]).measurements
    assert len(link.runner.measured) == 6
    builders.go.release(5)
    assert len(list(waiting)) == 5


def test_searches_settle_evenly_stay_and_leave_lost_devices() -> None:
    fleet = fleet_of(*(FaultyLink() for _ in range(3)))
    searches = [FleetRunner(fleet, "h100") for _ in range(7)]
    homes = [fleet.settle(search, "h100") for search in searches]
    assert sorted(Counter(homes).values()) == [2, 2, 3]
    assert [fleet.settle(search, "h100") for search in searches] == homes
    lost = fleet.members()[homes[0] != "gpu0"]
    fleet.set_aside(lost, "broken")
    now = [fleet.settle(search, "h100") for search in searches]
    assert lost.name not in now and sorted(Counter(now).values()) == [3, 4]
    # those that are done make room for others
    stayed = next(name for name in fleet.members() if name.state == IDLE)
    del searches[0]
    searches = [search for search in searches if fleet.settle(search, "h100") == stayed.name]
    assert [fleet.settle(search, "h100") for search in searches].count(stayed.name) == (len(searches) + 1) // 2


def test_a_search_waits_for_its_own_device_and_not_for_a_lost_one() -> None:
    fleet = fleet_of(FaultyLink(), FaultyLink())
    own = fleet.take("h100", "gpu0")
    assert own is not None and own.name == "gpu0"
    assert fleet.take("h100", "gpu0", stay=True, over=after(0.05)) is None
    threading.Timer(0.05, fleet.give, (own,)).start()
    assert fleet.take("h100", "gpu0", stay=True) is own
    fleet.set_aside(own, "broken")
    other = fleet.take("h100", "gpu0", stay=True)
    assert other is not None and other.name == "gpu1"


def after(seconds: float) -> threading.Event:
    """An event that is set then."""
    event = threading.Event()
    threading.Timer(seconds, event.set).start()
    return event


def test_warming_up_waits_for_the_shared_compilers() -> None:
    builders, fleet = SlowBuilders(WORKLOAD), fleet_of(FaultyLink())
    runner = FleetRunner(fleet, "h100", builders=builders)
    assert isinstance(runner, WarmsUp)
    runner.warm_up()
    assert builders.warm == 1
    FleetRunner(fleet, "h100").warm_up()
    assert side_by_side(builders) > side_by_side(None) > 1
