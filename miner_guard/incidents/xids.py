"""The meaning of NVIDIA's Xid numbers, and the action for each: the rows of xids.toml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from miner_guard.config import read_toml


@dataclass(frozen=True)
class Xid:
    """One row of NVIDIA's catalogue."""

    number: int
    meaning: str
    tier: str
    fault: str
    """The component at fault."""

    level: str
    """Level of the startup check; `ok` if no action is needed."""

    restart: str
    """The restart policy's action; one of `miner_guard.incidents.knowledge.RESTARTS`."""

    action: str
    line: str | None = None
    """A lower-case regular expression: the row applies to lines where it matches after the
    number."""


@lru_cache(maxsize=1)
def catalogue() -> tuple[Xid, ...]:
    """Every row, in matching order: the first row that fits a number wins."""
    document = read_toml(Path(__file__).with_name("xids.toml"))
    tiers: dict[str, dict[str, Any]] = document["tier"]
    return tuple(Xid(**row, **tiers[row["tier"]]) for row in document["xid"])


def of_number(number: int) -> Xid | None:
    """The row for an Xid event, which has a number but no text; None if the catalogue lacks it."""
    return next((x for x in catalogue() if x.number == number and x.line is None), None)
