"""The store on SQLite and on PostgreSQL keeps its contract."""

from tests.contracts.store_contract import StoreContract


class TestStore(StoreContract):
    """Once on each database, by the `url` fixture's parameters."""
