"""What a team's database adds, on both databases."""

from __future__ import annotations

from tests.contracts.team_contract import TeamContract


class TestTeam(TeamContract):
    """On SQLite and PostgreSQL."""
