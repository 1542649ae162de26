"""The known errors, read from the `*.toml` files next to this module.

A file holds one table per label: `severity`, `restart`, `role`, `cause`, `fixes`,
`follows`, `events` and `patterns`. A pattern matches a line (lower-cased, without colours and
prefixes) that contains one of the words in `has`, none of those in `not`, and a match for `regex`.
`servers` names a list in the file's `[words]` table; a line that names a server must contain one
word from that list. `answer` names a table in the file's `[answers]`, whose `cause`, `fix` and
`source` several patterns share. `explain.py` says what `{detail|default}` and `[[…]]` mean.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from miner_guard.incidents import xids
from miner_guard.system.word_search import WordSearch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROLES = ("cause", "exception", "retry", "exit", "summary", "symptom", "warning", "notice")
"""A line's role in the course of an incident, ordered from nearest to the cause to farthest.

`cause` names the fault. `exception` is an exception or signal that ended a rank. `retry` is an
operation that was retried. `exit` reports how a process ended. `summary` is the program's
statement that it failed, without a reason. `symptom` is the effect on others. `warning` only warns
of the fault. `notice` stops nothing and needs no action now: it is reported only if nothing else
happened or only its effects, and the running guard ignores it.
"""

RESTARTS = ("transient", "outage", "once", "hardware", "config", "never")
"""What the restart policy may do after this root cause.

`transient`: the fault may clear by itself; restart with backoff. `outage`: restart with a longer
backoff, so that a remote service has time to recover. `once`: restart, but if the same label
recurs soon, a restart does not fix it. `hardware`: restart only if the startup checks pass.
`config`: a person must change something first; restart once anyway, since the guard may have
misread a line. `never`: the stop was requested.
"""

_HERE = Path(__file__).parent
_INDEX = "words.toml"
_OTHERS = {_INDEX, "xids.toml", "details.toml", "oom.toml"}

_SERVER = re.compile(r"host=\\?['\"]|https?://|connect call failed \('|connect to host ")
"""What precedes a server's name in a log line."""

_NEAR = 300
_XID = r"\bxid(?:.{0,30}\): ?|(?: error| event| code|:|#|=| |\(){1,4})"
"""The word `Xid` and what may separate it from the number, in kernel logs and in bug reports."""

_XID_NOTICES = {
    "informational": ". It does not stop any program.",
    "later": ". It does not stop any program, but the memory error that caused it may.",
}
"""The words that end a notice's cause, by tier."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way in which a label shows up in a line."""

    label: str
    role: str
    has: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    expression: str | None = None
    """A regular expression that must also match."""

    servers: tuple[str, ...] = ()
    alone: bool = False
    """Counts only if the line shows no other label, since any server may have failed."""

    frames: tuple[str, ...] = ()
    """If set, the pattern counts only for the last line of a traceback that passes through a file
    whose path contains one of these strings. An empty string matches any traceback, even one
    without paths, and is tried last."""

    at: tuple[str, ...] = ()
    """If set, the path of the deepest frame must contain one of these strings."""

    instead: frozenset[str] = frozenset()
    """For a pattern with frames, which of the line's other labels it replaces. If empty, the
    pattern counts only if the line shows no other label."""

    cause: str = ""
    """Replaces the label's cause if this line proves more or less than that cause claims."""

    fix: str = ""
    """A more precise fix for this line, listed before the label's fixes."""

    restart: str = ""
    source: str = ""
    """Source of the fix: a thread where it helped, or the vendor's page."""

    least: int = 1
    """How many of these lines must appear before they count."""

    cancels: tuple[str, ...] = ()
    """For a benign line, labels whose sightings just before it are retracted."""

    roles: tuple[str, ...] = ()
    """Roles of those sightings; empty means all."""

    notice: str = ""
    """For a benign line, the label that it is a notice about, if any."""

    @property
    def says_little(self) -> bool:
        """Whether the pattern matches with any traceback, or without one."""
        return "" in self.frames and not self.at

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        # Compiled when a line needs it: compiling every expression takes half a second.
        return re.compile(self.expression or "")

    def matches(self, text: str) -> bool:
        """Whether a lower-cased, cleaned text with the right words matches."""
        if self.expression is not None and self._regex.search(text) is None:
            return False
        others = self.servers and not any(word in text for word in self.servers)
        return not (others and _SERVER.search(text))

    def first_word(self, text: str) -> int:
        """Offset of the first `has` word in a long line; 0 if that word is near the beginning."""
        if len(text) <= _NEAR:
            return 0
        first = min((at for word in self.has if (at := text.find(word)) >= 0), default=0)
        return first if first > _NEAR else 0


UNKNOWN_EXCEPTION = Pattern("code_bug", "exception")
"""An exception that no pattern matches."""


class Fix(NamedTuple):
    """One fix for an incident, and where it comes from."""

    do: str
    source: str = ""


@dataclass(frozen=True)
class Label:
    """One kind of incident."""

    name: str
    severity: str
    restart: str
    cause: str
    fixes: tuple[Fix, ...]
    follows: frozenset[str]
    """Labels that are the cause of this one if both appear."""

    events: frozenset[str]
    """The guard's own events for the same fault. After one of them, the incident is reported only
    if the miner ends."""

    overcome_by_steps: bool = False
    """Whether continued training proves that the program recovered from the fault."""

    undone_by_losses: bool = False
    """For a non-finite loss, whether finite losses in later steps show that training recovered."""

    role: str = "cause"
    """Default role of the label's patterns."""


class Match(NamedTuple):
    """What a line matches: one pattern per label with causes first, or a benign entry."""

    patterns: Sequence[Pattern] = ()
    benign: Pattern | None = None
    framed: Sequence[Pattern] = ()
    """Patterns that may match the line if its traceback fits."""

    text: str = ""


@dataclass(frozen=True)
class Document:
    """The content of all knowledge files."""

    labels: Mapping[str, Label]
    patterns: tuple[Pattern, ...]
    benign: tuple[Pattern, ...]


class Knowledge:
    """All labels and patterns. Thread-safe. The files are read by `prepare`, or when the first line
    with a trigger arrives: parsing TOML would take a sixth of the guard's start-up time."""

    def __init__(
        self, triggers: Iterable[str], events: Iterable[str], read: Callable[[], Document]
    ) -> None:
        self.triggers = WordSearch(word.encode() for word in triggers)
        """Every line that can match contains at least one of these words."""

        self._events = frozenset(events)
        self._read = read

    @cached_property
    def _document(self) -> Document:
        return self._read()

    def prepare(self) -> None:
        """Read the files and build the searches."""
        for part in ("_document", "_search", "_by_word"):
            assert getattr(self, part)

    @property
    def labels(self) -> Mapping[str, Label]:
        """All labels by name."""
        return self._document.labels

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of all labels."""
        return self._document.patterns

    @cached_property
    def entries(self) -> tuple[Pattern, ...]:
        """All patterns, in the order in which they are tried: those for benign lines first, those
        that match with any traceback last."""
        return (
            *self._document.benign,
            *sorted(self.patterns, key=lambda pattern: pattern.says_little),
        )

    def shown_by(self, event: str) -> Sequence[str]:
        """Labels whose cause is shown by this guard event."""
        if event not in self._events:
            return ()
        causes = {p.label for p in self.patterns if p.role == "cause"}
        return sorted(name for name in causes if event in self.labels[name].events)

    @cached_property
    def _search(self) -> WordSearch:
        return WordSearch(
            word.encode() for entry in self.entries for word in (*entry.has, *entry.excludes)
        )

    @cached_property
    def _by_word(self) -> Mapping[bytes, list[int]]:
        places: dict[bytes, list[int]] = {}
        for place, entry in enumerate(self.entries):
            for word in entry.has:
                places.setdefault(word.encode(), []).append(place)
        return places

    def match(self, text: str) -> Match:
        """What a lower-cased, cleaned line matches."""
        words = self._search.found_in(text.encode(errors="replace"))
        places = {place for word in words for place in self._by_word.get(word, ())}
        candidates = [self.entries[place] for place in sorted(places)]
        return self._match(
            text, [e for e in candidates if not any(w.encode() in words for w in e.excludes)]
        )

    @staticmethod
    def _match(text: str, candidates: Sequence[Pattern]) -> Match:
        matching: dict[str, Pattern] = {}
        framed: list[Pattern] = []
        harmless: list[Pattern] = []
        for pattern in candidates:
            if pattern.role == "benign":
                harmless.append(pattern)
            elif pattern.frames:
                framed.append(pattern)
            elif pattern.label not in matching and pattern.matches(text):
                matching[pattern.label] = pattern
        benign = next((pattern for pattern in harmless if pattern.matches(text)), None)
        if benign is not None:
            return Match(benign=benign)
        if len(matching) > 1:
            matching = {name: p for name, p in matching.items() if not p.alone} or matching
        ordered = sorted(matching.values(), key=lambda pattern: ROLES.index(pattern.role))
        return Match(ordered, None, framed, text)


def in_traceback(match: Match, paths: str) -> Sequence[Pattern]:
    """What an exception matches together with the files of its traceback, in lower case."""
    patterns, deepest = match.patterns, paths.rstrip().rpartition(" ")[2]
    named = {p.label for p in patterns if not p.alone}
    for p in match.framed:
        fits = p.instead & named if named else not p.instead and not (p.says_little and patterns)
        there = not p.at or any(path in deepest for path in p.at)
        if fits and there and any(path in paths for path in p.frames) and p.matches(match.text):
            others = (m for m in patterns if m.label not in p.instead | {p.label} and not m.alone)
            return [p, *others]
    return patterns


@lru_cache(maxsize=1)
def load() -> Knowledge:
    """The knowledge shipped with the package."""
    index = tomllib.loads((_HERE / _INDEX).read_text(encoding="utf-8"))
    return Knowledge(index["triggers"], index["events"], lambda: parse(shipped()))


def shipped() -> dict[str, str]:
    """The knowledge files in the package, by name."""
    paths = (path for path in sorted(_HERE.glob("*.toml")) if path.name not in _OTHERS)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def parse(texts: Mapping[str, str]) -> Document:
    """Combine TOML documents, keyed by file name. Raises TypeError for a key that nothing reads; a
    test checks the values in the package's files."""
    labels: dict[str, Label] = {}
    patterns: list[Pattern] = []
    benign: list[Pattern] = []
    for text in texts.values():
        document = tomllib.loads(text)
        lists, answers = document.pop("words", {}), document.pop("answers", {})
        for entry in chain.from_iterable(map(_expanded, document.pop("benign", []))):
            benign.append(_pattern({**entry, "label": "benign", "role": "benign"}))
        for name, table in document.items():
            labels[name] = label = _label(name, table)
            for entry in chain.from_iterable(map(_expanded, table["patterns"])):
                shared = answers[entry["answer"]] if "answer" in entry else {}
                whole = {"label": name, "role": label.role, **shared, **entry}
                if isinstance(entry.get("servers"), str):
                    whole["servers"] = lists[entry["servers"]]
                patterns.append(_pattern(whole))
    return Document(labels, tuple(patterns), tuple(benign))


def _label(name: str, table: Mapping[str, Any]) -> Label:
    fixes = tuple(Fix(f) if isinstance(f, str) else Fix(**f) for f in table["fixes"])
    sets = {key: frozenset(table.get(key, ())) for key in ("follows", "events")}
    rest = {key: value for key, value in table.items() if key != "patterns"}
    return Label(**{**rest, **sets, "name": name, "fixes": fixes})


_FIELDS = {"not": "excludes", "regex": "expression"}
"""The fields of Pattern by the keys of the files that have another name."""


def _pattern(entry: Mapping[str, Any]) -> Pattern:
    fields: dict[str, Any] = {
        _FIELDS.get(key, key): tuple(value) if isinstance(value, list) else value
        for key, value in entry.items()
        if key != "answer"
    }
    if "at" in entry:
        fields.setdefault("frames", ("",))
    fields["instead"] = frozenset(entry.get("instead", ()))
    return Pattern(**fields)


def _expanded(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One entry for each Xid in the tiers that `entry` lists, or the entry if it lists none."""
    tiers = entry.get("xids")
    if tiers is None:
        yield entry
        return
    shared = {key: value for key, value in entry.items() if key != "xids"}
    for row in xids.catalogue():
        if row.tier in tiers:
            ending = _XID_NOTICES[row.tier] if "notice" in entry else f"; caused by {row.fault}."
            yield {
                "regex": _xid_regex(row),
                "cause": f"Xid {row.number}: {row.meaning}{ending}",
                "fix": row.action,
                "source": "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
                "restart": row.restart,
                **shared,
            }


def _xid_regex(row: xids.Xid) -> str:
    number = f"{_XID}{row.number}\\b"
    if row.line is not None:
        return f"{number}.{{0,200}}{row.line}"
    others = [x.line for x in xids.catalogue() if x.number == row.number and x.line is not None]
    return number + "".join(f"(?!.{{0,200}}{line})" for line in others)
