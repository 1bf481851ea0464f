"""Prometheus metrics, in a registry of their own so that two apps in one process do not collide."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper ends in seconds."""

Counts = Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]
"""Gives the jobs by state and the stored trials by status."""


class Metrics:
    """The app's counters. `counts` is asked at every scrape."""

    def __init__(self, counts: Counts) -> None:
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
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """Nothing: without this the registry would ask the database at start."""
        return ()

    def collect(self) -> Iterable[Metric]:
        by_state, by_status = self._counts()
        jobs = GaugeMetricFamily("kernelwright_jobs", "Jobs by state.", labels=["state"])
        for state, count in by_state.items():
            jobs.add_metric([state], count)
        trials = CounterMetricFamily("kernelwright_trials", "Trials stored, by status.", labels=["status"])
        for status, count in by_status.items():
            trials.add_metric([status], count)
        return (jobs, trials)


class LatencyMiddleware:
    """Observes how long each request took, under its route's template ("/v1/jobs/{id}"), never under raw paths."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500
        start = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.latency.labels(method, route, str(status)).observe(time.perf_counter() - start)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that get a label of their own."""
