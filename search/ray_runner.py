"""Devices of a Ray cluster: an actor beside each GPU, compilers as tasks on the CPUs, results streamed to the caller.

Actors are placed by Ray's own resources: one whole GPU of an accelerator type each, or for a replay one unit of the
custom resource of that name, such as `ray start --resources='{"replay:h100": 4}'`. What an actor or its node takes down
with it is done again elsewhere; see `fleet`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kernelwright.errors import BuildFailed, DeviceLost, KernelwrightError, MissingDependency, UnknownDevice
from kernelwright.kernels.build import BuildJob
from kernelwright.search.cache_files import build_and_pack, install_files
from kernelwright.search.fleet import Fleet, Rules
from kernelwright.search.fleet_batch import Builders, Built
from kernelwright.search.fleet_runner import FleetRunner
from kernelwright.search.open_runner import open_runner
from kernelwright.search.paced_runner import PacedRunner
from kernelwright.search.replay_runner import ReplayRunner
from kernelwright.search.runner import Runner
from kernelwright.search.station import Station
from kernelwright.types import DeviceSpec, Schedule, Workload

NAMESPACE = "kernelwright"

_COMPILER_ENV = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_PLANNER = "kernelwright.kernels.build:plan_on_meta"


@dataclasses.dataclass(frozen=True)
class Opening:
    """What an actor opens where it runs: a device as typed, a folder of recordings there, and how slow a replay is
    (see `PacedRunner`; 0 takes no time)."""

    spec: str
    recorded: Path | None = None
    pace: float = 0.0

    def open(self) -> Runner:
        """The runner; UnknownDevice where there is no such device."""
        runner = open_runner(self.spec, recorded=self.recorded)
        return PacedRunner(runner, self.pace) if self.pace and isinstance(runner, ReplayRunner) else runner


class Seat:
    """The actor: a station whose kernels may have been compiled on another machine."""

    def __init__(self, opening: Opening) -> None:
        self._station = Station(opening.open())

    def answer(self, method: str, *args: Any) -> tuple[bool, Any]:
        """See `Station.answer`; of a compiled schedule the last argument is its files."""
        if method == "measure" and len(args) > 3:
            try:
                install_files(args[3])
            except (KernelwrightError, OSError) as error:
                # The runner compiles once more, which is slower and as good.
                logging.getLogger(__name__).warning("compiled files could not be kept: %s", error)
            args = args[:3]
        return self._station.answer(method, *args)


class RayLink:
    """Implements `Link` with an actor; options: Ray's, which place it."""

    def __init__(self, ray: ModuleType, opening: Opening, options: Mapping[str, Any]) -> None:
        self._ray = ray
        self._opening, self._options = opening, dict(options)
        self._actor: Any = None

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What the station's method returns; DeviceLost when the actor, its node or the wait for it ended."""
        errors = self._ray.exceptions
        try:
            if self._actor is None:
                kind = self._ray.remote(Seat)
                self._actor = kind.options(max_restarts=0, max_task_retries=0, **self._options).remote(self._opening)
            ok, value = self._ray.get(self._actor.answer.remote(method, *args), timeout=timeout_s)
        except errors.GetTimeoutError:
            self.close()
            raise DeviceLost(f"no answer to {method} after {timeout_s:g} s") from None
        except errors.RayError as error:
            self.close()
            raise DeviceLost(_last_line(error)) from None
        if not ok:
            raise value
        return value

    def revive(self) -> None:
        """Let go of the actor; the next call makes another, wherever Ray finds a place for it."""
        self.close()

    def close(self) -> None:
        """End the actor, and with it what it measures."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(actor, no_restart=True)


class RayBuilders:
    """Implements `Builders` with Ray tasks of one CPU each; the machine code goes from there to the GPU by Ray."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        environment = {"env_vars": _COMPILER_ENV}
        # A task whose node went is done again once; a compiler that aborts takes its process down twice, and fails.
        self._task = ray.remote(build_and_pack).options(
            num_cpus=1, num_returns=2, max_retries=1, runtime_env=environment
        )

    def build_all(
        self, workload: Workload, schedules: Sequence[Schedule], device: DeviceSpec, deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Built | Exception]]:
        """See `Builders`; the deadline is the caller's to keep, who drops what has not come."""
        waiting: dict[Any, tuple[Schedule, Any]] = {}
        for schedule in schedules:
            report, files = self._task.remote(BuildJob(workload, schedule, device, _PLANNER, False))
            waiting[report] = (schedule, files)
        try:
            while waiting:
                (done,), _ = self._ray.wait(list(waiting), num_returns=1)
                schedule, files = waiting.pop(done)
                yield schedule, self._outcome(done, files)
        finally:
            for report in waiting:
                with contextlib.suppress(Exception):
                    self._ray.cancel(report)

    def close(self) -> None:
        """Nothing is held: Ray ends the tasks' processes."""

    def _outcome(self, report: Any, files: Any) -> Built | Exception:
        try:
            outcome = self._ray.get(report)
        except self._ray.exceptions.RayError as error:
            return BuildFailed(f"the compiler died or was stopped: {_last_line(error)}")
        return outcome if isinstance(outcome, Exception) else Built((outcome, files))


class RayRunner(FleetRunner):
    """Implements `Runner` on a fleet of its own, which ends with it: one search over a whole cluster.

    spec, address, count: as in `ray_fleet`. width: devices that measure together; None takes all.
    """

    def __init__(
        self,
        spec: str,
        *,
        address: str | None = None,
        count: int | None = None,
        width: int | None = None,
        recorded: Path | None = None,
    ) -> None:
        self._owned, self._compilers = ray_fleet(spec, address=address, count=count, recorded=recorded)
        members = self._owned.members()
        slug = self._owned.slugs()[0]
        super().__init__(self._owned, slug, builders=self._compilers, width=width or len(members))

    def close(self) -> None:
        """End the actors; closing twice is harmless."""
        self._owned.close()
        if self._compilers is not None:
            self._compilers.close()


def ray_fleet(
    spec: str,
    *,
    address: str | None = None,
    count: int | None = None,
    recorded: Path | None = None,
    pace: float = 0.0,
    rules: Rules | None = None,
) -> tuple[Fleet, Builders | None]:
    """The fleet of a Ray cluster, and its compilers (None for replays, which compile nothing).

    spec: "cuda" takes GPUs of any type, "h100" those of that accelerator type, "replay:h100" replays; several with
    commas. address: of the cluster, None for the one that this process is connected to, or a new one on this machine.
    count: most devices of each; None takes all there are, of replays without a resource of their own one.
    UnknownDevice where the cluster has none, MissingDependency without Ray.
    """
    ray = connect(address)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    links: dict[str, RayLink] = {}
    replays = True
    for one in (part.strip().lower() for part in spec.split(",")):
        replay = one.partition(":")[0] == "replay"
        replays = replays and replay
        opening = Opening(one if replay else "cuda", recorded, pace)
        for number, options in enumerate(placements(nodes, one, count)):
            links[f"{one}#{number}"] = RayLink(ray, opening, options)
    return Fleet(links, rules), None if replays else RayBuilders(ray)


def connect(address: str | None = None) -> ModuleType:
    """The ray module, connected to a cluster; MissingDependency when it is not installed, DeviceLost when the cluster
    does not answer."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            "a fleet on Ray needs ray, which is not installed; try: pip install 'kernelwright[ray]'"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise DeviceLost(f"the Ray cluster at {address or 'this machine'} does not answer: {error}") from error
    module: ModuleType = ray
    return module


def placements(nodes: Sequence[Mapping[str, float]], spec: str, count: int | None) -> list[dict[str, Any]]:
    """Ray's options for each actor of a device as typed; nodes: the resources of each machine of the cluster."""
    found: list[dict[str, Any]] = []
    if spec.partition(":")[0] == "replay":
        units = int(sum(node.get(spec, 0) for node in nodes))
        options = {"num_cpus": 0, "resources": {spec: 1}} if units else {"num_cpus": 0}
        found = [options] * (units or count or 1)
    else:
        wanted = "" if spec in ("cuda", "gpu") else spec
        for node in nodes:
            for accelerator in _accelerators(node):
                if _is_kind(accelerator, wanted):
                    found += [{"num_cpus": 0, "num_gpus": 1, **_typed(accelerator)}] * int(node["GPU"])
                    break
    if not found:
        there = sorted({name for node in nodes for name in _accelerators(node) if name})
        raise UnknownDevice(f"the Ray cluster has no {spec!r}; its accelerators: {', '.join(there) or 'none'}")
    return found[:count]


_TYPE = "accelerator_type:"


def _accelerators(node: Mapping[str, float]) -> list[str]:
    """Accelerator types of a node that has GPUs; "" where Ray does not know them."""
    if not node.get("GPU"):
        return []
    return [name.removeprefix(_TYPE) for name in node if name.startswith(_TYPE)] or [""]


def _is_kind(accelerator: str, slug: str) -> bool:
    return slug.partition("-")[0].upper() in accelerator.upper()


def _typed(accelerator: str) -> dict[str, str]:
    return {"accelerator_type": accelerator} if accelerator else {}


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
