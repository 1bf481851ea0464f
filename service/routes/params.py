"""Parameters that several routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from kernelwright.service.schemas import MAX_TEXT

MAX_PAGE = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most entries on the page.")]
After = Annotated[
    str | None, Query(max_length=64, description="Where the page begins: taken from `next` of the page before.")
]
Operator = Annotated[str | None, Query(max_length=MAX_TEXT, description="Only this operator.", examples=["matmul"])]
Hardware = Annotated[str | None, Query(max_length=MAX_TEXT, description="Only this GPU.", examples=["h100"])]
Id = Annotated[str, Path(max_length=64, description="As given by other answers.", examples=["0123456789abcdef0123"])]
