"""Answers that were given before, kept in memory as long as nothing was written to the database."""

from __future__ import annotations

import collections
import dataclasses
import hashlib

MAX_ALIASES = 32_768


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """An answer as it is sent. body: JSON. etag: with its quotes. record_id: what it rests on. final: the cost model
    has been asked where that is needed."""

    body: bytes
    etag: str
    how: str
    record_id: str | None
    final: bool = True


def etag_of(body: bytes) -> str:
    """A strong entity tag: equal for equal bodies only."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


class AnswerCache:
    """Holds answers under a key for as long as the database's token stays; the least used make room.

    Bounded by the bytes of the bodies. For one thread, the event loop's.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._answers: collections.OrderedDict[str, tuple[str, Given]] = collections.OrderedDict()
        self._aliases: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._bytes = 0

    def get(self, key: str, token: str | None) -> Given | None:
        """The answer under this key, if it was made under this token."""
        found = self._answers.get(key)
        if found is None or token is None or found[0] != token:
            return None
        self._answers.move_to_end(key)
        return found[1]

    def put(self, key: str, token: str | None, given: Given) -> None:
        """Keep an answer that was worked out after this token was read."""
        if token is None or len(given.body) > self.max_bytes:
            return
        if (old := self._answers.pop(key, None)) is not None:
            self._bytes -= len(old[1].body)
        self._answers[key] = (token, given)
        self._bytes += len(given.body)
        while self._bytes > self.max_bytes:
            _, (_, dropped) = self._answers.popitem(last=False)
            self._bytes -= len(dropped.body)

    def key_of(self, query: bytes) -> str | None:
        """The key of a question that was asked in these very words before."""
        return self._aliases.get(query)

    def name(self, query: bytes, key: str) -> None:
        """Remember which key a question in these words has."""
        self._aliases[query] = key
        if len(self._aliases) > MAX_ALIASES:
            self._aliases.popitem(last=False)
