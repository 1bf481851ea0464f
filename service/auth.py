"""API keys: who asks, and what may they do. Only the SHA-256 of a key is stored; the key itself is shown once."""

from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import dataclasses
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping

from anyio import to_thread
from starlette.requests import cookie_parser

from kernelwright.db import Store
from kernelwright.errors import UsageError
from kernelwright.service.missing import NotFound

SCOPES = ("read", "tune", "admin")
"""What a key may do, each including those before it: ask; submit and cancel jobs; see the audit log."""

PREFIX = "kw_"
COOKIE = "kernelwright_key"
FRESH_SECONDS = 1.0
MAX_REMEMBERED = 1024

NOBODYS = "?"
"""Stands for what was sent in place of a key and cannot be one."""

_TOKEN = re.compile(r"kw_[A-Za-z0-9_-]{43}")


@dataclasses.dataclass(frozen=True)
class Credentials:
    """A key as it was sent, by its digest."""

    sha256: str


@dataclasses.dataclass(frozen=True)
class Principal:
    """Who asks. id: of the key, or "open:<address>" where none is asked for."""

    id: str
    name: str
    scopes: frozenset[str]

    @classmethod
    def anybody(cls, address: str) -> Principal:
        """Somebody who needs no key."""
        return cls(f"open:{address}", "", frozenset(SCOPES))

    def may(self, scope: str) -> bool:
        """Whether one of the scopes held includes this one."""
        return any(held in self.scopes for held in SCOPES[SCOPES.index(scope) :])

    @property
    def held(self) -> str:
        """The scopes in words."""
        return " and ".join(scope for scope in SCOPES if scope in self.scopes) or "none"


def new_key() -> str:
    """A new key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What is stored of a key. It has 256 random bits, so that no slow hash is needed against guessing."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_key(store: Store, name: str, scopes: tuple[str, ...]) -> tuple[str, str]:
    """Store a new key; returns its id and the key, which nobody can read again."""
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise UsageError(f"a scope must be one of {', '.join(SCOPES)}, got {', '.join(unknown) or 'none'}")
    if not 0 < len(name.strip()) <= 80 or not name.isprintable():
        raise UsageError(f"a key's name must have 1 to 80 printable characters, got {name[:90]!r}")
    key = new_key()
    return store.add_key(name.strip(), digest_of(key), scopes).id, key


def rotate_key(store: Store, key_id: str) -> tuple[str, str]:
    """Make a key with the name and scopes of another one, then revoke that; returns the new id and key."""
    old = next((key for key in store.list_keys() if key.id == key_id), None)
    if old is None or old.revoked_at is not None:
        raise NotFound(f"no good key has the id {key_id!r}; kernelwright keys list shows them")
    made = make_key(store, old.name, tuple(sorted(old.scopes)))
    store.revoke_key(key_id)
    return made


def read_credentials(headers: Mapping[str, str]) -> Credentials | None:
    """The key in `Authorization: Bearer`, in X-API-Key, as the password of `Authorization: Basic`, or in the cookie
    that the sign-in page sets. Anything else that is sent counts as a key that nobody has."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if not kind:
        value = headers.get("x-api-key", "") or cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
    elif kind.lower() == "basic":
        value = _password(value)
    elif kind.lower() != "bearer":
        value = NOBODYS
    return credentials_of(value) if value.strip() else None


def credentials_of(text: str) -> Credentials:
    """A key as somebody typed it."""
    value = text.strip()
    return Credentials(digest_of(value) if _TOKEN.fullmatch(value) else "")


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return NOBODYS


class KeyRing:
    """The keys of a store as they were at most FRESH_SECONDS ago; a revoked one is useless after that.

    Once a key was ever made, one is needed, even when all have been revoked since.
    """

    def __init__(self, store: Store, required: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._required = required
        self._clock = clock
        self._any, self._any_since = False, float("-inf")
        self._known: collections.OrderedDict[str, tuple[Principal | None, float]] = collections.OrderedDict()
        self._used: set[str] = set()
        self._lock = asyncio.Lock()

    async def needed(self) -> bool:
        """Whether a request needs a key."""
        if self._required or self._any:
            return True
        if self._clock() - self._any_since > FRESH_SECONDS:
            async with self._lock:
                if self._clock() - self._any_since > FRESH_SECONDS:
                    self._any = bool(await to_thread.run_sync(self._store.list_keys))
                    self._any_since = self._clock()
        return self._any

    def remembered(self, given: Credentials) -> bool:
        """Whether `find` would answer without asking the store."""
        found = self._known.get(given.sha256)
        return not given.sha256 or (found is not None and self._clock() - found[1] <= FRESH_SECONDS)

    async def find(self, given: Credentials) -> Principal | None:
        """Whose key it is; None when it is nobody's (any more)."""
        if not given.sha256:
            return None
        if not self.remembered(given):
            # The digest is looked up, not the key: how long that takes tells nothing about any key.
            key = await to_thread.run_sync(self._store.find_key_by_hash, given.sha256)
            principal = None if key is None else Principal(key.id, key.name, key.scopes)
            self._known[given.sha256] = (principal, self._clock())
            self._known.move_to_end(given.sha256)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        principal = self._known[given.sha256][0]
        if principal is not None:
            self._used.add(principal.id)
        return principal

    def take_used(self) -> set[str]:
        """The ids of the keys that were used since this was last called."""
        used, self._used = self._used, set()
        return used
