"""Explains a whole log, or one incident: its cause and fixes, with what its lines name filled in.

A text of the knowledge files may ask the lines for a detail, such as a package, path, host or port:
`{path|the disk}` is the path or else `the disk`, and `[[ in {path}]]` is kept only if the
lines name the path. No placeholder reaches a reader.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from miner_guard.config import read_toml
from miner_guard.incidents import logs, oom
from miner_guard.incidents.knowledge import Fix, Knowledge
from miner_guard.incidents.root import Incident, Launched, Retraction, RootCauseAnalyzer, Sighting
from miner_guard.incidents.scan import Scanner
from miner_guard.record.store import StoredEvent

_PLACE = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
_MAX_LENGTH = 4096
"""Maximum number of characters of a line to search."""


@lru_cache(maxsize=1)
def _details() -> Mapping[str, Any]:
    return read_toml(Path(__file__).with_name("details.toml"))


def named(detail: str, texts: Iterable[str]) -> str:
    """The first match in `texts` for `detail`, a key of details.toml; empty if nothing matches."""
    names: Mapping[str, str] = _details()["names"].get(detail, {})
    for text in texts:
        for pattern in _details()["patterns"][detail]:
            # re compiles and caches each pattern on first use, so none of them slows down the
            # guard's start.
            match = re.search(pattern, text[:_MAX_LENGTH], re.MULTILINE)
            value = match[1].rstrip(".") if match else ""
            if value := names.get(value, value):
                return value
    return ""


def filled(text: str, lines: Iterable[str]) -> str:
    """Replace each `{detail|default}` in `text` with the detail from the lines, or else with the
    default. `[[…]]` is kept only if the lines name every `{detail}` in it."""
    lines = tuple(lines)

    def part(optional: re.Match[str]) -> str:
        named_all = all(named(place[1], lines) for place in _PLACE.finditer(optional[1]))
        return optional[1] if named_all else ""

    whole = _OPTIONAL.sub(part, text)
    return _PLACE.sub(lambda place: named(place[1], lines) or place[2] or "", whole).strip()


_SHOWN = ("label", "severity", "line", "excerpt", "cause", "fixes", "sources", "root")
_CHUNK = 1 << 18
_SAMPLE = 400


@dataclass(frozen=True)
class Explained:
    """One incident in a log, in human-readable form."""

    label: str
    severity: str
    restart: str
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
        return {name: getattr(self, name) for name in _SHOWN}


@dataclass(frozen=True)
class LogExplanation:
    """The faults found in a log."""

    findings: tuple[Explained, ...]
    lines: int

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
    unfinished = False
    for chunk in _in_utf_8(log):
        unfinished = not chunk.endswith(b"\n")
        case.add(scanner.feed(chunk))
    case.add(scanner.finish())
    incidents = [
        in_words(incident, knowledge, training, redact) for incident in case.incidents(scanner.line)
    ]
    return LogExplanation(tuple(incidents), scanner.line - 1 + unfinished)


_LABELS = {"hang_detected": "hang", "gpu_fault": "gpu_hardware", "disk_stuck": "disk_failed"}
"""The labels of the guard's events whose name is not the label itself."""

_SUMMARIES = {"crash_loop"}
"""Events that count others. Their name is a label for other supervisors' lines."""


def explain_events(
    events: Sequence[StoredEvent],
    knowledge: Knowledge,
    training: oom.Training,
    redact: Callable[[str], str] = str,
) -> LogExplanation:
    """Explain a run from the events that the guard recorded. Attempts and the root cause are those
    of a log. What the guard found in the curves is the root if the last attempt has no other."""
    case, curves = RootCauseAnalyzer(knowledge), dict[str, Explained]()
    for line, event in enumerate(events, 1):
        label = _label_of(event, knowledge)
        if event.name == "miner_started":
            case.add([Launched(line)])
            curves.clear()
        elif label is not None and event.level == "info":
            if label != "straggler":  # What a slow rank cost until then is not undone.
                case.add([Retraction((label,), line, None)])
        elif label is not None:
            usual = knowledge.labels[label].role
            role = "warning" if event.level == "warning" else usual
            case.add([Sighting(label, role, line, event.text, event.rank)])
        elif event.level != "info" and event.fields.get("cause") and event.fields.get("fixes"):
            curves[event.name] = _stated(event, event.name, line)
    incidents = []
    for incident in case.incidents(len(events)):
        stated = _latest(events, incident, knowledge)
        incidents.append(stated or in_words(incident, knowledge, training, redact))
    rows = sorted(curves.values(), key=lambda finding: finding.line)
    if rows and not any(finding.root for finding in incidents):
        rows[-1] = replace(rows[-1], root=True)
    return LogExplanation((*incidents, *rows), len(events))


def _label_of(event: StoredEvent, knowledge: Knowledge) -> str | None:
    shown = knowledge.shown_by(event.name) or (_LABELS.get(event.name, event.name),)
    label = str(event.fields.get("label")) if event.name == "incident" else shown[0]
    return label if label in knowledge.labels and event.name not in _SUMMARIES else None


def _latest(
    events: Sequence[StoredEvent], incident: Incident, knowledge: Knowledge
) -> Explained | None:
    """The incident in the words of its attempt's latest event with fixes: a later NaN knows more
    about its cause. None if no event has any."""
    line, stated = incident.first.line, None
    for event in events[line - 1 :]:
        if event.name == "miner_started":
            break
        told = event.level != "info" and event.fields.get("fixes")
        if told and _label_of(event, knowledge) == incident.label:
            stated = _stated(event, incident.label, line, root=incident.root)
    return stated


def _stated(event: StoredEvent, label: str, line: int, *, root: bool = False) -> Explained:
    """An event that itself states the cause and fixes."""
    fields, fixes = event.fields, tuple(map(str, event.fields.get("fixes") or ()))
    return Explained(
        label,
        event.level,
        str(fields.get("restart", "never")),
        line,
        str(fields.get("excerpt") or event.text),
        str(fields.get("cause", "")),
        fixes,
        ("",) * len(fixes),
        1,
        tuple(fields.get("ranks") or (() if event.rank is None else (event.rank,))),
        root,
    )


def _in_utf_8(log: BinaryIO) -> Iterator[bytes]:
    """The log's bytes in chunks. PowerShell and Windows tools write logs in UTF-16."""
    chunk = log.read(_CHUNK)
    # ASCII in UTF-16 has a NUL in every second byte.
    half = len(chunk[:_SAMPLE]) // 2 or 1
    little, big = (chunk[:_SAMPLE][at::2].count(0) > 0.8 * half for at in (1, 0))
    codec = ""
    if chunk.startswith(codecs.BOM_UTF16_LE) or (little and not big):
        codec = "utf-16-le"
    elif chunk.startswith(codecs.BOM_UTF16_BE) or (big and not little):
        codec = "utf-16-be"
    decoder = codecs.getincrementaldecoder(codec or "utf-8")("replace")
    while chunk:
        yield decoder.decode(chunk).lstrip("\ufeff").encode() if codec else chunk
        chunk = log.read(_CHUNK)


def _frame(sighting: Sighting, redact: Callable[[str], str]) -> str:
    """Where the error was raised. The path of a file that is here holds no secret of the log's."""
    own, _, package = sighting.frame.partition("\n")
    here = Path(own.removeprefix("frame=").rpartition(", line ")[0]).is_file()
    return f"{own if here else redact(own)}\n{redact(package)}"


def in_words(
    incident: Incident,
    knowledge: Knowledge,
    training: oom.Training,
    redact: Callable[[str], str] = str,
) -> Explained:
    """One incident's cause and fixes, with the details from its lines filled in."""
    label, sighting = knowledge.labels[incident.label], incident.first
    sightings = (sighting, *incident.sightings)
    # The reason often follows on the line after the one that names the error.
    exact = next((s for s in sightings if s.fix), sighting)
    notice = sighting.role == "notice"
    cause, fixes = sighting.cause or exact.cause or label.cause, list(label.fixes) * (not notice)
    if exact.fix:
        fixes.insert(0, Fix(exact.fix, exact.source))
    if incident.label == "cuda_oom":
        cause, fixes = _out_of_memory(incident, cause, fixes, training)
    texts = [f"{redact(s.text)}\n{_frame(s, redact)}" for s in sightings]
    told = [Fix(do, fix.source) for fix in fixes if (do := filled(fix.do, texts))]
    return Explained(
        incident.label,
        "info" if notice else label.severity,
        "never" if notice else sighting.restart or label.restart,
        sighting.line,
        logs.excerpt(redact(sighting.text)),
        f"{redact(filled(cause, texts))}{_where(incident)}",
        tuple(fix.do for fix in told),
        tuple(fix.source for fix in told),
        incident.count,
        tuple(incident.ranks),
        incident.root,
    )


def _out_of_memory(
    incident: Incident, cause: str, fixes: list[Fix], training: oom.Training
) -> tuple[str, list[Fix]]:
    parsed = [oom.parse(s.text) for s in (incident.first, *incident.sightings)]
    numbers = next((numbers for numbers in parsed if numbers.kind != "unknown"), parsed[0])
    return f"{cause} {oom.describe(numbers)}".strip(), oom.fixes(numbers, fixes, training)


def _where(incident: Incident) -> str:
    more = len(incident.ranks) - 8
    ranks = ", ".join(map(str, incident.ranks[:8])) + (f" and {more} more" if more > 0 else "")
    repeats = f"seen {incident.count} times" if incident.count > 1 else ""
    on = f"on rank {ranks}" if len(incident.ranks) == 1 else f"on ranks {ranks}" if ranks else ""
    words = " ".join(part for part in (repeats, on) if part)
    return f" ({words})" if words else ""
