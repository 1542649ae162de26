"""Packs the reports of `guard.diagnose` into journal entries and unpacks them. Standard library
only, because the supervisor uses it too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Report = dict[str, Any]

_MAX_ENTRY = 3800
"""Bytes of JSON per journal entry. An entry holds 4080 bytes, including its envelope."""


def pack(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Split the reports into values for the `report` of journal entries, each small enough for one
    entry.

    Each value holds `common` (what all ranks share), `keys` and `rows` (what differs: per rank, a
    list of the values of `keys`, followed by a mapping with the rank's other keys), `silent`
    ([rank, error] of ranks without a report), and `part` and `parts` (its number and their count).
    """
    answered = [r for r in reports if not r.get("error")]
    shared = [k for k in (answered[0] if answered else ()) if all(k in r for r in answered)]
    common = {k: answered[0][k] for k in shared if all(r[k] == answered[0][k] for r in answered)}
    keys = [k for k in shared if k not in common]
    rows = [
        [*(r[k] for k in keys), {k: v for k, v in r.items() if k not in shared}] for r in answered
    ]
    silent = [[r["rank"], r["error"]] for r in reports if r.get("error")]
    room = _MAX_ENTRY - _size(common) - _size(keys)
    groups = _grouped([("rows", row) for row in rows] + [("silent", row) for row in silent], room)
    return [
        {"common": common, "keys": keys, **g, "part": n, "parts": len(groups)}
        for n, g in enumerate(groups)
    ]


def _grouped(lines: Sequence[tuple[str, list[Any]]], room: int) -> list[dict[str, list[Any]]]:
    groups: list[dict[str, list[Any]]] = [{"rows": [], "silent": []}]
    used = 0
    for kind, line in lines:
        size = _size(line) + 1
        if used and used + size > room:
            groups.append({"rows": [], "silent": []})
            used = 0
        groups[-1][kind].append(line)
        used += size
    return groups


def unpack(parts: Iterable[Mapping[str, Any]]) -> list[Report]:
    """Restore the reports from the values that `pack` returned, in rank order."""
    reports: list[Report] = []
    for part in parts:
        for *values, own in part["rows"]:
            reports.append(
                {**part["common"], **dict(zip(part["keys"], values, strict=True)), **own}
            )
        reports += [{"rank": rank, "error": error} for rank, error in part["silent"]]
    return sorted(reports, key=lambda r: int(r["rank"]))


def _size(document: Any) -> int:
    return len(json.dumps(document, separators=(",", ":"), default=str).encode())
