"""The guard's own lines in a log: its findings are evidence, and a launch line discards the
sightings before it."""

from __future__ import annotations

from miner_guard.incidents.knowledge import Knowledge
from miner_guard.incidents.log_lines import INCIDENT, LAUNCH
from miner_guard.incidents.patterns import Label

_FIX = " fix: "
_LEVEL = 80
"""Characters of a console line that contain its level."""


def named(lowered: str, knowledge: Knowledge) -> tuple[Label, str] | None:
    """The incident that the guard named in this line, and the role in which it counts."""
    start = lowered.find(INCIDENT)
    if start < 0 or _FIX not in lowered[start:]:
        return None
    label = knowledge.labels.get(lowered[start + len(INCIDENT) :].partition(":")[0])
    if label is None:
        return None
    return label, "retry" if "warning" in lowered[: min(start, _LEVEL)] else label.role


def launches(lowered: str) -> bool:
    """Whether the guard reports in this line that it started the miner."""
    return LAUNCH in lowered[:_LEVEL]
