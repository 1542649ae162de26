"""Reads the guard's own lines in a log. Its findings count as evidence, and a launch line discards
earlier sightings."""

from __future__ import annotations

from miner_guard.incidents.knowledge import Knowledge
from miner_guard.incidents.log_lines import INCIDENT, LAUNCH
from miner_guard.incidents.patterns import Label

_FIX = " fix: "
_LEVEL = 80
"""The level appears within this many characters of the start of a console line."""


def named(lowered: str, knowledge: Knowledge) -> tuple[Label, str] | None:
    """The incident that the guard reports on this line, and its role."""
    start = lowered.find(INCIDENT)
    if start < 0 or _FIX not in lowered[start:]:
        return None
    label = knowledge.labels.get(lowered[start + len(INCIDENT) :].partition(":")[0])
    if label is None:
        return None
    return label, "retry" if "warning" in lowered[: min(start, _LEVEL)] else label.role


def launches(lowered: str) -> bool:
    """Whether this is the line on which the guard reports that it started the miner."""
    return LAUNCH in lowered[:_LEVEL]
