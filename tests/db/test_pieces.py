"""Times of pieces of graphs: what is stored comes back, by device and toolchain, and the newest counts."""

from __future__ import annotations

import dataclasses

from kernelwright.db import Store
from kernelwright.pieces import PieceTimes, option_key

TIMES = PieceTimes("p" * 20, "d" * 20, "t" * 20, "mm[8, 8]+silu", 12.5, {"a" * 20: 11.0}, {"b" * 20: "wrong"}, 0.01)


def test_pieces_are_kept_by_device_and_toolchain(store: Store) -> None:
    others = [dataclasses.replace(TIMES, device_key="e" * 20), dataclasses.replace(TIMES, toolchain_key="u" * 20)]
    another = dataclasses.replace(TIMES, piece="q" * 20)
    for times in (TIMES, *others, another):
        store.put_piece(times)
    assert store.pieces("d" * 20, "t" * 20) == [TIMES, another]
    newer = dataclasses.replace(TIMES, theirs_us=10.0)
    store.put_piece(newer)
    assert store.pieces("d" * 20, "t" * 20) == [newer, another]


def test_only_what_is_faster_by_more_than_the_noise_wins() -> None:
    near = dataclasses.replace(TIMES, noise=0.2)
    assert TIMES.wins("a" * 20) and not near.wins("a" * 20)
    assert TIMES.knows("b" * 20) and not TIMES.wins("b" * 20)
    assert not TIMES.knows("c" * 20) and not TIMES.wins("c" * 20)


def test_options_differ_by_what_is_put_in() -> None:
    others = (("one", "w", "s"), ("two", "w", "s"), ("one", "v", "s"), ("one", "w", "r"))
    keys = {option_key(*parts) for parts in others}
    assert len(keys) == 4
