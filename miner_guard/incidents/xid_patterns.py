"""Patterns for lines with an Xid number, built from the rows of `miner_guard/incidents/xids.toml`.

An entry in a knowledge file names tiers instead of numbers: `{ has = ["xid "], xids = ["reset"] }`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miner_guard.incidents import xids

_CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"

_BEFORE = r"\bxid(?:.{0,30}\): ?|(?: error| event| code|:|#|=| |\(){1,4})"
"""The word `Xid` and what may separate it from the number, in kernel logs and in bug reports."""


_NOTICES = {
    "informational": ". It does not stop any program.",
    "later": ". It does not stop any program, but the memory error that caused it may.",
}
"""The words that end a notice's cause, by tier."""


def expanded(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield one entry for each Xid in the tiers that `entry` lists, or `entry` itself if it lists
    none."""
    tiers = entry.get("xids")
    if tiers is None:
        yield entry
        return
    shared = {key: value for key, value in entry.items() if key != "xids"}
    for row in xids.catalogue():
        if row.tier in tiers:
            ending = _NOTICES[row.tier] if "notice" in entry else f"; caused by {row.fault}."
            cause = f"Xid {row.number}: {row.meaning}{ending}"
            made = {
                "regex": _regex(row),
                "cause": cause,
                "fix": row.action,
                "source": _CATALOGUE,
                "restart": row.restart,
            }
            yield {**made, **shared}


def _regex(row: xids.Xid) -> str:
    number = f"{_BEFORE}{row.number}\\b"
    if row.line is not None:
        return f"{number}.{{0,200}}{row.line}"
    others = [x.line for x in xids.catalogue() if x.number == row.number and x.line is not None]
    return number + "".join(f"(?!.{{0,200}}{line})" for line in others)
