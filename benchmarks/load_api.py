"""Load on a service: questions at a steady rate from one process, each timed from the moment when it was due."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import uvloop


@dataclasses.dataclass(frozen=True)
class Load:
    """What to send. rate: requests a second. connections: kept open. paths: drawn from, evenly. apart: those of them
    whose latencies are told apart, because the service must work out more for them."""

    port: int
    rate: float
    seconds: float
    paths: Sequence[str]
    apart: frozenset[str] = frozenset()
    connections: int = 32
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came back. latencies in milliseconds, sorted; they begin when a request was due, not when it could be sent,
    so that a service that stalls cannot hide it. apart: those of the paths that are told apart."""

    latencies: Sequence[float]
    errors: int
    seconds: float
    apart: Sequence[float] = ()

    def summary(self) -> dict[str, Any]:
        """The figures for a result file."""
        requests = len(self.latencies) + len(self.apart) + self.errors
        out: dict[str, Any] = {
            "requests": requests,
            "errors": self.errors,
            "rate": round(requests / self.seconds, 1),
            **_percentiles(self.latencies),
        }
        if self.apart:
            out["apart"] = {"requests": len(self.apart), **_percentiles(self.apart)}
        return out


def _percentiles(latencies: Sequence[float]) -> dict[str, float]:
    """Latencies that half, 95 %, 99 % and all of the requests kept within, in milliseconds."""
    last = len(latencies) - 1
    at = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: round(latencies[min(last, int(share * len(latencies)))], 2) for name, share in at.items()}


def run_load(load: Load) -> Outcome:
    """Send the load; a status other than 200 is an error."""
    # The service's own kind of loop: what this process computes must not keep the cores from the service.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(load))


async def _run(load: Load) -> Outcome:
    rng = random.Random(load.seed)
    due: asyncio.Queue[tuple[float, str] | None] = asyncio.Queue()
    seen: list[tuple[str, float]] = []
    errors: list[str] = []
    workers = [asyncio.create_task(_connection(load.port, due, seen, errors)) for _ in range(load.connections)]
    start = time.perf_counter()
    for number in range(int(load.rate * load.seconds)):
        moment = start + number / load.rate
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        due.put_nowait((moment, rng.choice(load.paths)))
    for _ in workers:
        due.put_nowait(None)
    await asyncio.gather(*workers)
    plain = sorted(latency for path, latency in seen if path not in load.apart)
    apart = sorted(latency for path, latency in seen if path in load.apart)
    return Outcome(plain, len(errors), time.perf_counter() - start, apart)


async def _connection(
    port: int, due: asyncio.Queue[tuple[float, str] | None], seen: list[tuple[str, float]], errors: list[str]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (request := await due.get()) is not None:
        moment, path = request
        try:
            status, _ = await _ask(reader, writer, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        except (OSError, EOFError, ValueError) as error:
            errors.append(repr(error))
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        if status == 200:
            seen.append((path, 1000 * (time.perf_counter() - moment)))
        else:
            errors.append(str(status))
    writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return int(head[9:12]), await reader.readexactly(length)


def time_batch(port: int, shapes: Sequence[str], hardware: str = "h100") -> tuple[float, int]:
    """Milliseconds of one batch query of these matmuls, and how many were answered with a schedule."""
    workloads = [{"operator": "matmul", "shape": shape} for shape in shapes]
    body = json.dumps({"hardware": hardware, "workloads": workloads}).encode()
    head = "POST /v1/kernels/best:batch HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return asyncio.run(_time_batch(port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body))


async def _time_batch(port: int, request: bytes) -> tuple[float, int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.perf_counter()
    status, body = await _ask(reader, writer, request)
    took = 1000 * (time.perf_counter() - start)
    writer.close()
    if status != 200:
        raise RuntimeError(f"the batch must be answered with 200, got {status}: {body[:200]!r}")
    return took, sum(
        item["best"] is not None and item["best"]["schedule"] is not None for item in json.loads(body)["results"]
    )


def path_of(shape: str, hardware: str = "h100") -> str:
    """The question for a bf16 matmul of this shape."""
    return f"/v1/kernels/best?operator=matmul&hardware={hardware}&shape={quote(shape, safe='=,')}"
