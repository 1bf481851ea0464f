"""Pieces of graphs that were timed as a whole, by device and toolchain."""

from __future__ import annotations

import json

from sqlalchemy import Engine, select

from kernelwright.db.engine import session_scope
from kernelwright.db.rows import dialect_insert, now
from kernelwright.db.tables import PieceRow
from kernelwright.pieces import PieceTimes
from kernelwright.types import canonical_json


class PieceStore:
    """The timed pieces of a database. Values in and out are frozen."""

    engine: Engine

    def put_piece(self, times: PieceTimes) -> None:
        """Store the times of a piece in place of earlier ones with this device and toolchain."""
        place = {"key": times.piece, "device_key": times.device_key, "toolchain_key": times.toolchain_key}
        with session_scope(self.engine, write=True) as session:
            moment = session.scalar(select(now(session)))
            values = {"created_at": moment, "body": canonical_json(times.to_json())}
            statement = dialect_insert(session, PieceRow).values(place | values)
            session.execute(statement.on_conflict_do_update(index_elements=list(place), set_=values))

    def pieces(self, device_key: str, toolchain_key: str) -> list[PieceTimes]:
        """All pieces that were timed on this device with this toolchain, in the order of their keys."""
        query = select(PieceRow.body).where(PieceRow.device_key == device_key, PieceRow.toolchain_key == toolchain_key)
        with session_scope(self.engine) as session:
            return [PieceTimes.from_json(json.loads(body)) for body in session.scalars(query.order_by(PieceRow.key))]
