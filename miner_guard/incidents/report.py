"""Explains a whole log in one pass, in constant memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from miner_guard.incidents import details, log_text, oom
from miner_guard.incidents.knowledge import Knowledge
from miner_guard.incidents.patterns import Fix
from miner_guard.incidents.root_cause import Incident, RootCauseAnalyzer
from miner_guard.incidents.scanner import Scanner

_CHUNK = 1 << 18


@dataclass(frozen=True)
class Explained:
    """One incident in a log, in human-readable form."""

    label: str
    severity: str
    restart: str
    applies: str
    line: int
    excerpt: str
    cause: str
    fixes: tuple[str, ...]
    sources: tuple[str, ...]
    """Source of each fix; empty if the advice is our own."""

    count: int
    ranks: tuple[int, ...]
    root: bool

    def as_dict(self) -> dict[str, Any]:
        """The document that `explain --json` prints."""
        return {
            "label": self.label,
            "severity": self.severity,
            "line": self.line,
            "excerpt": self.excerpt,
            "cause": self.cause,
            "fixes": list(self.fixes),
            "sources": list(self.sources),
            "root": self.root,
        }


@dataclass(frozen=True)
class LogExplanation:
    """The faults found in a log."""

    findings: tuple[Explained, ...]
    lines: int
    size: int
    """Size of the log in bytes."""

    @property
    def root(self) -> Explained | None:
        """The root cause of the others; None if nothing is wrong."""
        return next((finding for finding in self.findings if finding.root), None)

    def as_dict(self) -> dict[str, Any]:
        """The document that `explain --json` prints."""
        return {
            "root_cause": None if self.root is None else self.root.label,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def explain(
    log: BinaryIO, knowledge: Knowledge, training: oom.Training, redact: Callable[[str], str] = str
) -> LogExplanation:
    """Read all of `log` and explain it. Raises only OSError, if the log cannot be read."""
    scanner, case = Scanner(knowledge, notices=True), RootCauseAnalyzer(knowledge)
    size, unfinished = 0, False
    while chunk := log.read(_CHUNK):
        size += len(chunk)
        unfinished = not chunk.endswith(b"\n")
        case.add(scanner.feed(chunk))
    case.add(scanner.finish())
    found = [
        in_words(incident, knowledge, training, redact) for incident in case.incidents(scanner.line)
    ]
    return LogExplanation(tuple(found), scanner.line - 1 + unfinished, size)


def in_words(
    incident: Incident,
    knowledge: Knowledge,
    training: oom.Training,
    redact: Callable[[str], str] = str,
) -> Explained:
    """One incident's cause and fixes, with the details from its lines filled in."""
    label, sighting = knowledge.labels[incident.label], incident.first
    seen = (sighting, *incident.kept)
    # The reason often follows on the line after the one that names the error.
    exact = next((s for s in seen if s.fix), sighting)
    notice = sighting.role == "notice"
    cause, fixes = sighting.cause or exact.cause or label.cause, list(label.fixes) * (not notice)
    if exact.fix:
        fixes.insert(0, Fix(exact.fix, exact.source))
    if incident.label == "cuda_oom":
        cause, fixes = _out_of_memory(incident, cause, fixes, training)
    texts = [redact(s.text) for s in seen]
    filled = [(details.filled(fix.do, texts), fix.source) for fix in fixes]
    filled = [(do, source) for do, source in filled if do]
    return Explained(
        incident.label,
        "info" if notice else label.severity,
        "never" if notice else sighting.restart or label.restart,
        label.applies,
        sighting.line,
        log_text.excerpt(redact(sighting.text)),
        f"{redact(details.filled(cause, texts))}{_where(incident)}",
        tuple(do for do, _ in filled),
        tuple(source for _, source in filled),
        incident.count,
        tuple(incident.ranks),
        incident.root,
    )


def _out_of_memory(
    incident: Incident, cause: str, fixes: list[Fix], training: oom.Training
) -> tuple[str, list[Fix]]:
    parsed = [oom.parse(f"{s.text} {s.more}") for s in (incident.first, *incident.kept)]
    numbers = next((numbers for numbers in parsed if numbers.kind != "unknown"), parsed[0])
    shown = oom.describe(numbers)
    parts = [cause, f"It {shown}." if shown else "", oom.meaning(numbers)]
    return " ".join(part for part in parts if part), oom.fixes(numbers, fixes, training)


def _where(incident: Incident) -> str:
    more = len(incident.ranks) - 8
    ranks = ", ".join(map(str, incident.ranks[:8])) + (f" and {more} more" if more > 0 else "")
    seen = f"seen {incident.count} times" if incident.count > 1 else ""
    on = f"on rank {ranks}" if len(incident.ranks) == 1 else f"on ranks {ranks}" if ranks else ""
    words = " ".join(part for part in (seen, on) if part)
    return f" ({words})" if words else ""
