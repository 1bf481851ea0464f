"""A fleet that is closed, or cannot be opened, keeps no device; nobody waits for one that nobody brings back."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, ClassVar

import pytest

from kernelwright.errors import DeviceLost
from kernelwright.search.fleet_runner import FleetRunner
from kernelwright.search.local_fleet import LocalLink
from kernelwright.search.station import Station
from tests.search.fleets import FAST, FaultyLink, ProbedRunner, RecordedRunner, fleet_of
from tests.search.test_fleet import all_of, wait_for


class Opened(RecordedRunner):
    """A runner that takes a while to open, and counts in `open` how many are."""

    open: ClassVar[list[Opened]] = []
    began = threading.Event()
    ready = threading.Event()

    def __init__(self) -> None:
        self.began.set()
        assert self.ready.wait(60)
        super().__init__()
        self.open.append(self)

    def close(self) -> None:
        if self in self.open:
            self.open.remove(self)


@pytest.fixture
def opened() -> type[Opened]:
    Opened.open.clear()
    Opened.began.clear()
    Opened.ready.clear()
    return Opened


def test_a_device_that_comes_up_after_the_fleet_was_closed_is_given_back(opened: type[Opened]) -> None:
    fleet = fleet_of(LocalLink(opened), FaultyLink(), rules=dataclasses.replace(FAST, grace_s=0.01))
    fleet.close()
    opened.ready.set()
    wait_for(lambda: not any(thread.name.startswith("kernelwright-connect") for thread in threading.enumerate()))
    assert not opened.open


@pytest.mark.parametrize("error", [None, DeviceLost("broken"), OSError("no more files")])
def test_a_device_that_is_brought_back_after_the_fleet_was_closed_is_given_back(
    opened: type[Opened], error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.ready.set()
    fleet = fleet_of(LocalLink(opened), FaultyLink())
    member = fleet.members()[0]
    opened.ready.clear()
    opened.began.clear()
    fleet.lost(member, "gone")
    assert opened.began.wait(60)
    fleet.close()
    if error is not None:
        monkeypatch.setattr(Station, "probe", ProbedRunner(error).probe)
    opened.ready.set()
    wait_for(lambda: not any(thread.name == f"revive-{member.name}" for thread in threading.enumerate()))
    assert not opened.open


def test_interrupting_the_start_gives_all_devices_back(opened: type[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **words: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("kernelwright.search.fleet.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fleet_of(LocalLink(opened), LocalLink(opened))
    opened.ready.set()
    wait_for(lambda: not any(thread.name.startswith("kernelwright-connect") for thread in threading.enumerate()))
    assert not opened.open


def test_a_device_that_fails_in_an_unforeseen_way_is_set_aside_not_waited_for() -> None:
    def fails(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        if link.revived:
            raise OSError("no more files")

    fleet = fleet_of(FaultyLink(hook=fails))
    fleet.lost(fleet.members()[0], "gone")
    with pytest.raises(DeviceLost, match="no more files"):
        all_of(FleetRunner(fleet, "h100"))

    def never(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        raise OSError("no more files")

    with pytest.raises(DeviceLost, match="gpu0: no more files"):
        fleet_of(FaultyLink(hook=never))
