"""Run as a process: store trials until told to stop, and say each key once it was stored.

Arguments: URL, first number, how many.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from values import trial  # type: ignore[import-not-found]

from kernelwright.db import Store


def main(url: str, first: int, count: int) -> None:
    """Wait for a line, then write."""
    with Store.open(url) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(first, first + count):
            value = trial(number)
            store.add_trial(value)
            print(value.key, flush=True)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
