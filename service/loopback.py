"""Which addresses mean this machine only."""

from __future__ import annotations

import functools
import ipaddress


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
