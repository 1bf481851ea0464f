"""How far a stored trial or record may be relied on."""

from __future__ import annotations

import dataclasses
import enum


class Trust(enum.StrEnum):
    """MEASURED: by this database's own workers. TRUSTED: shipped with the package, or imported with a valid signature.
    UNTRUSTED: imported without one, until it is measured here. QUARANTINED: found wrong or failing, never served."""

    MEASURED = "measured"
    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"
    QUARANTINED = "quarantined"


@dataclasses.dataclass(frozen=True)
class RecordState:
    """What a database knows about a record beside the record itself.

    source: what brought it, "" for its own and "import:<file>" or "pretuned" for others. reason: why it is in
    quarantine. uses: how often it was the answer.
    """

    trust: Trust
    source: str = ""
    reason: str = ""
    uses: int = 0
