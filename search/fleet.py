"""Many devices as one: who is free, who measures, who was lost and is brought back, who is set aside and why.

A fleet knows nothing of how its devices are reached: each is behind a `Link` (an actor on another machine, a runner in
this process). Any number of searches may use one fleet from threads of their own.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, Protocol

from kernelwright.errors import DeviceLost, KernelwrightError, UnknownDevice
from kernelwright.search.device_guard import PROBE_BAND, Probe, why_unfit
from kernelwright.search.station import Description, installed_code
from kernelwright.types import Measurement, Status

logger = logging.getLogger(__name__)

IDLE, BUSY, LOST, ASIDE = "idle", "busy", "lost", "aside"
"""States of a device. A lost one is being brought back; one that is aside is not used any more."""


class Link(Protocol):
    """The way to one station. Used by one thread at a time, save `close`."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What the station's method returns; DeviceLost when it dies or stays silent for so long, and whatever error of
        ours it raised."""
        ...

    def revive(self) -> None:
        """Make the station afresh after it was lost; DeviceLost when that is not possible now."""
        ...

    def close(self) -> None:
        """Give the device back; closing twice is harmless."""
        ...


@dataclasses.dataclass(frozen=True)
class Rules:
    """How much a fleet puts up with.

    call_s: seconds for a trial, loading its operands included. finals_s: for a final round. connect_s: for a station
    to start. losses: in a row, after which a device is set aside. tries: devices that a schedule may take down before
    it counts as crashed. retry_s: before a lost device is brought back, doubled each time. suspicious: crashed trials
    in a row after which a device is looked at. hedge: an idle device repeats a trial that takes so many times the usual
    one, and hedge_s at least. probe_band: see `device_guard.PROBE_BAND`.
    """

    call_s: float = 120.0
    finals_s: float = 180.0
    connect_s: float = 180.0
    grace_s: float = 20.0
    losses: int = 3
    tries: int = 2
    retry_s: float = 2.0
    suspicious: int = 3
    hedge: float = 8.0
    hedge_s: float = 10.0
    probe_band: float = PROBE_BAND


@dataclasses.dataclass
class Member:
    """One device of a fleet, and what became of it. busy_s: seconds that it was asked things."""

    name: str
    link: Link
    about: Description | None = None
    state: str = LOST
    reason: str = "not reached yet"
    losses: int = 0
    crashes: int = 0
    calls: int = 0
    busy_s: float = 0.0
    idle_since: float = 0.0
    probe: Probe | None = None

    @property
    def slug(self) -> str:
        """The short name of its kind; "" for one that was never reached."""
        return "" if self.about is None else self.about.device.slug


class Fleet:
    """The devices behind `links`, by name. Raises DeviceLost when none can be reached.

    Of devices that share a name, those count that most agree with in toolchain; the others are set aside, as are those
    with kernel sources other than here, and those whose probe shows that they are not like their kind.
    """

    def __init__(self, links: Mapping[str, Link], rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._members = [Member(name, link) for name, link in links.items()]
        self._homes: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def members(self, slug: str | None = None) -> list[Member]:
        """The devices, of one kind or all; what they hold changes as the fleet works."""
        return [member for member in self._members if slug in (None, member.slug)]

    def slugs(self) -> list[str]:
        """The kinds of device that may still be used, as users type them."""
        return sorted({member.slug for member in self._members if member.state != ASIDE and member.slug})

    def about(self, slug: str) -> Description:
        """What devices of this kind are; UnknownDevice when the fleet has none."""
        for member in sorted(self.members(slug), key=lambda member: member.state == ASIDE):
            if member.about is not None:
                return member.about
        raise UnknownDevice(f"the fleet has {', '.join(self.slugs()) or 'no devices'}, got {slug!r}")

    def settle(self, search: object, slug: str) -> str:
        """Name of the device of this kind that a search should stay with, since its operands lie there: the one that it
        has, unless that is lost or has two searches more than another. Searches that are gone do not count."""
        with self._changed:
            usable = [member.name for member in self.members(slug) if member.state in (IDLE, BUSY)]
            if not usable:
                return ""
            own = self._homes.pop(search, "")
            searches = Counter(self._homes.values())
            least = min(usable, key=lambda name: searches[name])
            self._homes[search] = own if own in usable and searches[own] <= searches[least] + 1 else least
            return self._homes[search]

    def take(
        self, slug: str, prefer: str = "", over: threading.Event | None = None, *, stay: bool = False
    ) -> Member | None:
        """A device of this kind for the caller alone, waiting until one is free; None once `over` is set.

        prefer: name of the one to take if it is free; stay: wait for it as long as others only use it. DeviceLost when
        every device of the kind is set aside.
        """
        with self._changed:
            while not (over is not None and over.is_set()):
                self._require(slug)
                idle = [member for member in self._members if member.state == IDLE and member.slug == slug]
                busy = stay and any(member.name == prefer and member.state == BUSY for member in self._members)
                if idle and not busy:
                    chosen = min(idle, key=lambda member: (member.name != prefer, member.idle_since))
                    chosen.state = BUSY
                    return chosen
                self._changed.wait(0.2)
        return None

    def give(self, member: Member) -> None:
        """Take a device back from its user."""
        with self._changed:
            if member.state == BUSY:
                member.state, member.idle_since = IDLE, time.monotonic()
            self._changed.notify_all()

    def ask(self, member: Member, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call the device's station; DeviceLost when it fails, after which the caller says `lost`."""
        began = time.monotonic()
        try:
            result = member.link.call(method, *args, timeout_s=timeout_s or self.rules.call_s)
        finally:
            member.busy_s += time.monotonic() - began
        member.calls += 1
        return result

    def lost(self, member: Member, reason: str) -> None:
        """Say that a device that was taken is gone: it is brought back in the background, or set aside."""
        logger.warning("%s was lost: %s", member.name, reason)
        with self._changed:
            if self._closed.is_set():
                # whoever waits for it is told so
                return
            member.losses += 1
            member.state, member.reason = LOST, reason
            gone = member.losses >= self.rules.losses
            self._changed.notify_all()
        if gone:
            self.set_aside(member, f"lost {member.losses} times in a row, last: {reason}")
        elif not self._closed.is_set():
            threading.Thread(target=self._bring_back, args=(member,), name=f"revive-{member.name}", daemon=True).start()

    def judge(self, member: Member, measurement: Measurement) -> str:
        """Take in a trial's outcome; why the device itself is to blame for it, or "".

        After some crashes in a row the device is asked to run its probe: one that cannot has failed, not the schedules.
        """
        if measurement.status not in (Status.CRASHED, Status.TIMEOUT):
            member.losses = member.crashes = 0
            return ""
        member.crashes += 1
        if member.crashes < self.rules.suspicious:
            return ""
        member.crashes = 0
        try:
            member.probe = self.ask(member, "probe", timeout_s=self.rules.call_s)
        except KernelwrightError as error:
            return f"it crashed {self.rules.suspicious} times in a row and then failed its probe: {error}"
        return "" if member.probe is None else why_unfit(member.probe, {}, self.rules.probe_band)

    def set_aside(self, member: Member, reason: str) -> None:
        """Use a device no more."""
        logger.warning("%s is set aside: %s", member.name, reason)
        with self._changed:
            member.state, member.reason = ASIDE, reason
            self._changed.notify_all()
        member.link.close()

    def close(self) -> None:
        """Give all devices back; closing twice is harmless."""
        self._closed.set()
        with self._changed:
            for member in self._members:
                member.state, member.reason = ASIDE, "the fleet was closed"
            self._changed.notify_all()
        for member in self._members:
            member.link.close()

    def _require(self, slug: str) -> None:
        ours = self.members(slug)
        if not ours:
            raise UnknownDevice(f"the fleet has {', '.join(self.slugs()) or 'no devices'}, got {slug!r}")
        if all(member.state == ASIDE for member in ours):
            why = "; ".join(f"{member.name}: {member.reason}" for member in ours)
            raise DeviceLost(f"no {slug} is left to measure on ({why}); the trials so far are kept, run it again")

    def _connect(self) -> None:
        pool = ThreadPoolExecutor(max(1, len(self._members)), "kernelwright-connect")
        waiting = {pool.submit(self._describe, member): member for member in self._members}
        pool.shutdown(wait=False)
        pending = set(waiting)
        while pending and not any(member.about for member in self._members):
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        _, pending = wait(pending, self.rules.grace_s)
        late = [waiting[future] for future in pending]
        if not self._sort_out([member for member in self._members if member not in late]):
            why = "; ".join(f"{member.name}: {member.reason}" for member in self._members) or "it has none"
            raise DeviceLost(f"no device of the fleet can be reached ({why})")
        for future in pending:
            future.add_done_callback(lambda done: self._join_late(waiting[done]))

    def _describe(self, member: Member) -> None:
        try:
            about = self.ask(member, "describe", timeout_s=self.rules.connect_s)
            member.probe = self.ask(member, "probe", timeout_s=self.rules.connect_s)
            # starting is no work
            member.calls, member.busy_s = 0, 0.0
            member.about = about
        except Exception as error:
            member.reason = str(error) or type(error).__name__
        self._let_go_if_closed(member)

    def _let_go_if_closed(self, member: Member) -> None:
        """A device that came up while the fleet was closed is given back by whoever brought it up."""
        if self._closed.is_set():
            member.link.close()

    def _join_late(self, member: Member) -> None:
        if member.about is None:
            self.set_aside(member, member.reason)
            return
        peers = [one.about.toolchain.key for one in self.members(member.slug) if one.about and one.state != ASIDE]
        reason = _why_other(member.about, (peers or [member.about.toolchain.key])[0], installed_code())
        if reason:
            self.set_aside(member, reason)
        else:
            self._welcome(member, member.about)

    def _sort_out(self, ready: Sequence[Member]) -> bool:
        """Admit the devices that answered and are like their kind; whether any answered."""
        reached = [member for member in ready if member.about is not None]
        for member in ready:
            if member.about is None:
                self.set_aside(member, member.reason)
        for member in reached:
            member.state, member.reason = IDLE, ""
        code = installed_code()
        for slug in {member.slug for member in reached}:
            ours = [member for member in reached if member.slug == slug]
            counts = Counter(member.about.toolchain for member in ours if member.about)
            usual = max(counts, key=lambda toolchain: (counts[toolchain], toolchain.key))
            for member in ours:
                reason = _why_other(member.about, usual.key, code)
                if reason:
                    self.set_aside(member, reason)
            fit = [member for member in ours if member.state == IDLE and member.probe is not None]
            probes = {member.name: member.probe for member in fit if member.probe is not None}
            for member in fit:
                reason = why_unfit(probes[member.name], probes, self.rules.probe_band)
                if reason:
                    self.set_aside(member, reason)
        return bool(reached)

    def _bring_back(self, member: Member) -> None:
        pause = self.rules.retry_s
        while not self._closed.wait(pause):
            pause *= 2
            try:
                member.link.revive()
                about = self.ask(member, "describe", timeout_s=self.rules.connect_s)
                member.probe = self.ask(member, "probe", timeout_s=self.rules.connect_s)
            # whatever it is: nobody may wait for ever for a device that nobody brings back
            except Exception as error:
                self._let_go_if_closed(member)
                member.losses += 1
                member.reason = str(error)
                if member.losses >= self.rules.losses:
                    self.set_aside(member, f"could not be brought back: {error}")
                    return
                continue
            self._welcome(member, about)
            self._let_go_if_closed(member)
            return

    def _welcome(self, member: Member, about: Description) -> None:
        before = member.about
        if before is not None and (about.device.key, about.toolchain) != (before.device.key, before.toolchain):
            self.set_aside(member, f"came back as {about.device.name} with {about.toolchain}")
            return
        with self._changed:
            if member.state == LOST:
                member.about, member.state, member.idle_since = about, IDLE, time.monotonic()
                member.reason = ""
            self._changed.notify_all()


def _why_other(about: Description | None, toolchain_key: str, code: str) -> str:
    """Why a device's times would not compare with those of its kind, or ""."""
    if about is None:
        return "never reached"
    if about.toolchain.key != toolchain_key:
        return f"its toolchain is not that of most {about.device.slug}s here: {about.toolchain}"
    if not about.recorded and about.code != code:
        return "it has other kernel sources than this process; install the same release on every machine"
    return ""
