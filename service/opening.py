"""Opening the database that the settings name, with something in it from the first start on."""

from __future__ import annotations

import logging

from kernelwright.db import Store
from kernelwright.db.pretuned import load_pretuned
from kernelwright.service.settings import Settings

logger = logging.getLogger(__name__)


def open_store(settings: Settings) -> Store:
    """The store; an empty one gets the records that ship with the package, unless the settings say no."""
    store = Store.open(settings.db)
    if settings.pretuned:
        try:
            count = load_pretuned(store)
        except BaseException:
            store.close()
            raise
        if count:
            logger.info("the database was empty: loaded %d pre-tuned records", count)
    return store
