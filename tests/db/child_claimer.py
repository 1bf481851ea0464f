"""Run as a process: claim jobs until none is left, and say the id of each. Arguments: URL, name of the worker."""

from __future__ import annotations

import sys

from kernelwright.db import Store


def main(url: str, worker: str) -> None:
    """Wait for a line, then claim."""
    with Store.open(url) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        while job := store.claim(worker):
            print(job.id, flush=True)


main(sys.argv[1], sys.argv[2])
