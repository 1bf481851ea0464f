"""Prometheus metrics, in a registry of their own so that two apps in one process do not collide."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernelwright.db import Store

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper ends in seconds."""

COUNT_SECONDS = 15.0
COUNT_SHARE = 50.0


@dataclasses.dataclass(frozen=True)
class Counted:
    """Jobs by state, trials by status, and trials stored a minute between the last two counts."""

    jobs: Mapping[str, int]
    trials: Mapping[str, int]
    trials_per_minute: float


class StoreCounts:
    """Counts what a store holds. Trials can be many, so they are counted again only after COUNT_SECONDS, and never more
    than a fiftieth of the time is spent on it."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._trials: dict[str, int] = {}
        self._counted, self._due = float("-inf"), float("-inf")
        self._rate = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> Counted:
        """The counts: of jobs now, of trials lately."""
        with self._lock:
            if self._clock() >= self._due:
                self._count()
            return Counted(self._store.count_jobs(), self._trials, self._rate)

    def _count(self) -> None:
        start = self._clock()
        trials = self._store.count_trials()
        more = sum(trials.values()) - sum(self._trials.values())
        self._rate = 60 * max(0, more) / (start - self._counted) if self._counted > float("-inf") else 0.0
        self._trials, self._counted = trials, start
        self._due = start + max(COUNT_SECONDS, COUNT_SHARE * (self._clock() - start))


class Metrics:
    """The app's counters. `counts` is asked at every scrape."""

    def __init__(self, counts: Callable[[], Counted]) -> None:
        self.registry = CollectorRegistry()
        self.queries = Counter(
            "kernelwright_queries", "Queries for a best kernel, by their answer.", ["how"], registry=self.registry
        )
        self.latency = Histogram(
            "kernelwright_request_seconds",
            "Seconds to answer a request, by route.",
            ["method", "route", "status"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_StoreCollector(counts))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _StoreCollector(Collector):
    def __init__(self, counts: Callable[[], Counted]) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """Nothing: without this the registry would ask the database at start."""
        return ()

    def collect(self) -> Iterable[Metric]:
        counted = self._counts()
        jobs = GaugeMetricFamily(
            "kernelwright_jobs", "Jobs by state; the queue is as deep as queued says.", labels=["state"]
        )
        for state, count in counted.jobs.items():
            jobs.add_metric([state], count)
        trials = CounterMetricFamily("kernelwright_trials", "Trials stored, by status.", labels=["status"])
        for status, count in counted.trials.items():
            trials.add_metric([status], count)
        rate = GaugeMetricFamily("kernelwright_trials_per_minute", "Trials stored a minute, lately.")
        rate.add_metric([], counted.trials_per_minute)
        return (jobs, trials, rate)


class LatencyMiddleware:
    """Observes how long each answer took to begin, under its route's template ("/v1/jobs/{id}"), never under raw paths.

    Streams go on after they began, for as long as somebody listens.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._latency = metrics.latency
        self._observers: dict[tuple[str, str, int], Histogram] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        seen = False

        async def watch(message: Message) -> None:
            nonlocal seen
            if message["type"] == "http.response.start":
                seen = True
                self._observe(scope, message["status"], time.perf_counter() - start)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if not seen:
                self._observe(scope, 500, time.perf_counter() - start)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        labels = (method, getattr(scope.get("route"), "path", "none"), status)
        observer = self._observers.get(labels)
        if observer is None:
            observer = self._observers[labels] = self._latency.labels(*map(str, labels))
        observer.observe(seconds)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that get a label of their own."""
