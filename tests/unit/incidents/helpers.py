"""Runs one log through the scanner and the analyzer, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from miner_guard.incidents import knowledge
from miner_guard.incidents.root import Incident, RootCauseAnalyzer
from miner_guard.incidents.scan import Scanner


def incidents(log: bytes | Iterable[bytes]) -> list[Incident]:
    """The incidents that `explain` finds in a log, passed whole or in pieces."""
    scanner = Scanner(knowledge.load(), notices=True)
    case = RootCauseAnalyzer(knowledge.load())
    for chunk in [log] if isinstance(log, bytes) else log:
        case.add(scanner.feed(chunk))
    case.add(scanner.finish())
    return case.incidents(scanner.line)


def root(log: str | bytes) -> str | None:
    """The root's label; None if nothing is wrong."""
    found = incidents(log if isinstance(log, bytes) else log.encode())
    return next((incident.label for incident in found if incident.root), None)
