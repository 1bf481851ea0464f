"""Several GPUs of this machine, without Ray: one measuring process each, and compilers that they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelwright.errors import DeviceLost, KernelwrightError, UnknownDevice
from kernelwright.kernels.cores import compilers
from kernelwright.search.fleet import Fleet, Rules
from kernelwright.search.fleet_batch import Builders, Built
from kernelwright.search.open_runner import open_runner
from kernelwright.search.runner import Runner
from kernelwright.search.station import Station
from kernelwright.types import DeviceSpec, Schedule, Workload

if TYPE_CHECKING:
    from kernelwright.kernels.build import BuildPool


WARM_UP_S = 120.0

ENOUGH = 8
"""Compilers for each GPU that a run can begin with."""

GPU_NAMES = frozenset({"cuda", "gpu", "rocm", "hip"})
"""What users type for the GPUs of this machine."""


class LocalLink:
    """Implements `Link` for a runner in this process, made when first needed.

    How long a call takes is the runner's business: a `ChildRunner` ends its child when that is silent.
    """

    def __init__(self, make: Callable[[], Runner]) -> None:
        self._make = make
        self._station: Station | None = None

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What the station's method returns, or whatever error of ours it raises; DeviceLost when the runner cannot be
        opened."""
        if self._station is None:
            try:
                self._station = Station(self._make())
            except KernelwrightError as error:
                raise DeviceLost(str(error)) from error
        ok, value = self._station.answer(method, *args)
        if not ok:
            raise value
        return value

    def revive(self) -> None:
        """Close the runner; the next call opens it afresh."""
        self.close()

    def close(self) -> None:
        """Close the runner, if there is one."""
        station, self._station = self._station, None
        if station is not None:
            station.close()


class PoolBuilders:
    """Implements `Builders` with the child compilers of this machine, whose results lie in its own Triton cache.

    enough: compilers that a run can begin with.
    """

    def __init__(self, pool: BuildPool, enough: int = 1) -> None:
        self._pool, self._enough = pool, enough

    def warm_up(self) -> None:
        """Wait until enough compilers are up, or could not be started."""
        self._pool.wait_until_up(WARM_UP_S, self._enough)

    def build_all(
        self, workload: Workload, schedules: Sequence[Schedule], device: DeviceSpec, deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Built | Exception]]:
        """See `Builders`."""
        builds = self._pool.build_all(workload, schedules, device, deadline)
        try:
            for schedule, outcome in builds:
                yield schedule, outcome if isinstance(outcome, Exception) else Built((outcome,))
        finally:
            builds.close()

    def close(self) -> None:
        """End the child compilers."""
        self._pool.close()


def local_fleet(
    spec: str,
    count: int | None = None,
    *,
    recorded: Path | None = None,
    compile_workers: int | None = None,
    rules: Rules | None = None,
) -> tuple[Fleet, Builders | None]:
    """The fleet of this machine, and its shared compilers (None where nothing is compiled).

    spec: "cuda" takes `count` GPUs (None: all there are), "cuda:0,cuda:2" those, "replay:h100" `count` replays (None:
    one). UnknownDevice when there are no such GPUs or recordings.
    """
    specs = _specs(spec, count)
    if all(one.startswith("replay") for one in specs):
        shared = open_runner(specs[0], recorded=recorded)
        links = {f"{one}#{number}": LocalLink(lambda: shared) for number, one in enumerate(specs)}
        return Fleet(links, rules), None
    # Late, because it brings torch and triton.
    from kernelwright.kernels.build import BuildPool

    pool = BuildPool(compile_workers or compilers())
    builders = PoolBuilders(pool, ENOUGH * len(specs))
    try:
        return Fleet(_gpu_links(specs), rules), builders
    except BaseException:
        builders.close()
        raise


def _specs(spec: str, count: int | None) -> list[str]:
    listed = [part.strip().lower() for part in spec.split(",")]
    kind = listed[0].partition(":")[0]
    same = all(part.partition(":")[0] == kind for part in listed)
    if not same or kind not in GPU_NAMES | {"replay"} or (kind == "replay" and len(listed) > 1):
        raise UnknownDevice(f'a fleet needs "cuda", "cuda:0,cuda:1" or "replay:<name>", got {spec!r}')
    if kind == "replay":
        return listed * (count or 1)
    if listed == [kind]:
        # Late, because it brings torch.
        from kernelwright.kernels.device import gpu_count

        listed = [f"{kind}:{index}" for index in range(gpu_count())]
    chosen = listed[:count]
    if not chosen:
        raise UnknownDevice("there is no GPU in this machine; name replay:<name> to tune on recorded trials")
    if count is not None and len(chosen) < count:
        raise UnknownDevice(f"{count} GPUs were asked for, and this machine has {len(chosen)}")
    return chosen


def _gpu_links(specs: Sequence[str]) -> Mapping[str, LocalLink]:
    return {spec: LocalLink(functools.partial(_open_gpu, int(spec.partition(":")[2] or 0))) for spec in specs}


def _open_gpu(index: int) -> Runner:
    """A GPU whose measuring process sees no other. It compiles alone only what the fleet's compilers did not."""
    # Late, because it brings torch and triton.
    from kernelwright.kernels.device import gpu_count, gpu_uuid
    from kernelwright.search.child_runner import ChildRunner

    # the only one is left as it is: a slice of a GPU has a name of another kind, and comes alone
    return ChildRunner(index, compile_workers=1, visible=gpu_uuid(index) if gpu_count() > 1 else "")
