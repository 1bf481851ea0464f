"""Who may use the API, and who did what: keys and the audit log."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable
from typing import Any, cast

from sqlalchemy import CursorResult, Engine, insert, select, update

from kernelwright.db.engine import session_scope
from kernelwright.db.rows import iso_from_unix, now, storable
from kernelwright.db.tables import AuditRow, KeyRow
from kernelwright.errors import UsageError


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key of the API as it is stored, without its secret. Moments are UTC, ISO 8601, by the database's clock.

    last_used_at: as `touch_key` was told. revoked_at: None while the key is good.
    """

    id: str
    name: str
    scopes: frozenset[str]
    created_at: str
    revoked_at: str | None = None
    last_used_at: str | None = None


@dataclasses.dataclass(frozen=True)
class AuditEntry:
    """One line of the audit log. who: the id of a key, or "open" where the API asks for none."""

    id: int
    at: str
    who: str
    action: str
    subject: str
    detail: str


class AccessStore:
    """Keys and audit log of a database. Values in and out are frozen."""

    engine: Engine

    def add_key(self, name: str, sha256: str, scopes: Iterable[str]) -> ApiKey:
        """Store a key by the SHA-256 of its secret, in hex; UsageError when it is there already."""
        key_id = secrets.token_hex(4)
        wanted = " ".join(sorted(set(scopes)))
        with session_scope(self.engine, write=True) as session:
            if session.scalar(select(KeyRow.id).where(KeyRow.hash == sha256)):
                raise UsageError("a key with this secret is stored already; make a new secret")
            values = {"name": storable(name), "hash": sha256, "scopes": wanted}
            session.execute(insert(KeyRow).values(id=key_id, created_at=now(session), **values))
            return _key(session.scalars(select(KeyRow).where(KeyRow.id == key_id)).one())

    def find_key_by_hash(self, sha256: str) -> ApiKey | None:
        """The key whose secret has this SHA-256, if it is good: None for one that was revoked or never was."""
        with session_scope(self.engine) as session:
            row = session.scalars(select(KeyRow).where(KeyRow.hash == sha256, KeyRow.revoked_at.is_(None))).first()
            return None if row is None else _key(row)

    def list_keys(self) -> list[ApiKey]:
        """Every key, revoked ones included, oldest first."""
        with session_scope(self.engine) as session:
            return [_key(row) for row in session.scalars(select(KeyRow).order_by(KeyRow.created_at, KeyRow.id))]

    def revoke_key(self, key_id: str) -> bool:
        """Make a key useless for good; False if there is no such key or it is revoked already."""
        with session_scope(self.engine, write=True) as session:
            good = update(KeyRow).where(KeyRow.id == key_id, KeyRow.revoked_at.is_(None))
            result = session.execute(good.values(revoked_at=now(session)))
            return cast("CursorResult[Any]", result).rowcount == 1

    def touch_key(self, key_ids: Iterable[str]) -> None:
        """Note that these keys were used just now; to be called now and then, not for each request."""
        with session_scope(self.engine, write=True) as session:
            session.execute(update(KeyRow).where(KeyRow.id.in_(set(key_ids))).values(last_used_at=now(session)))

    def audit(self, who: str, action: str, subject: str = "", detail: str = "") -> None:
        """Add a line to the audit log; it is on disk when this returns."""
        values = {"who": who, "action": action, "subject": subject, "detail": detail}
        with session_scope(self.engine, write=True) as session:
            safe = {name: storable(value) for name, value in values.items()}
            session.execute(insert(AuditRow).values(at=now(session), **safe))

    def audit_entries(self, limit: int = 100, offset: int = 0) -> list[AuditEntry]:
        """Lines of the audit log, newest first."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit).offset(offset)
        with session_scope(self.engine) as session:
            return [
                AuditEntry(row.id, iso_from_unix(row.at), row.who, row.action, row.subject, row.detail)
                for row in session.scalars(query)
            ]


def _key(row: KeyRow) -> ApiKey:
    revoked, used = row.revoked_at, row.last_used_at
    return ApiKey(
        id=row.id,
        name=row.name,
        scopes=frozenset(row.scopes.split()),
        created_at=iso_from_unix(row.created_at),
        revoked_at=None if revoked is None else iso_from_unix(revoked),
        last_used_at=None if used is None else iso_from_unix(used),
    )
