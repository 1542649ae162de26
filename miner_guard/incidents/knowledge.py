"""The known errors, read from the `*.toml` files beside this module.

A file holds one table per label: `severity`, `restart`, `applies`, `role`, `cause`, `fixes`,
`follows`, `events` and `patterns`. A pattern matches a line (lower-cased, without colour codes and
prefixes) that contains one of `has`, none of `not`, and in which `regex` is found. `has` keeps
matching cheap: a line without any of these words is skipped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from itertools import chain
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from miner_guard.eventlog.literal_search import literal_search
from miner_guard.incidents import regexes
from miner_guard.incidents.xid_patterns import expanded

ROLES = ("cause", "exception", "retry", "exit", "summary", "symptom", "warning")
"""The role of a line in the course of events, the nearest to the cause first.

`cause` names the fault. `exception` is an exception or signal that ended a rank. `retry` is an
operation that was retried. `exit` reports how a process ended. `summary` is the program's
statement that it failed, without a reason. `symptom` is the effect on others, `warning` only a
warning of it.
"""

RESTARTS = ("transient", "outage", "once", "hardware", "config", "never")
"""What the restart policy may do after this root cause.

`transient`: the fault may clear by itself; restart with backoff. `outage`: restart with the longer
backoff that a remote service needs to recover. `once`: restart, but if the same label recurs soon,
a restart does not fix it. `hardware`: restart only where the startup checks pass. `config`: a
person must change something first; tried once anyway, since a line may be misread. `never`: the
stop was requested.
"""

_PATTERN_KEYS = frozenset(
    {
        "has",
        "not",
        "regex",
        "frames",
        "role",
        "cause",
        "fix",
        "source",
        "restart",
        "least",
        "cancels",
        "roles",
        "instead",
    }
)
SEVERITIES = ("info", "warning", "error", "critical")
APPLIES = ("rank", "node", "job")


_NEAR = 300
"""Characters shown of a line together with the lines after it."""

_LONG = 1024
"""Longer texts are searched only around the words that the expression needs."""

_MAX_ANSWERS = 4096
_MAX_ANSWERED_LENGTH = 400


class BadKnowledge(Exception):
    """A knowledge file is invalid; the message names file, label and key."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """One form in which a label appears in a line."""

    label: str
    role: str
    has: tuple[str, ...]
    excludes: tuple[str, ...]
    regex: re.Pattern[str] | None
    frames: tuple[str, ...] = ()
    """If set, only the last line of a traceback through a file whose path holds one of these
    counts.

    An empty string stands for any path, or none, and is tried last.
    """

    cause: str = ""
    """Replaces the label's cause where this line proves less or more."""

    fix: str = ""
    """Precedes the label's fixes where this line gives a more exact one. `{path|default}` stands
    for a detail of the line (`details.py`), or the default where the line lacks it; the label's
    fixes may use it too."""

    restart: str = ""
    """Replaces the label's `restart` where this line's fault is transient and the label's others
    are not, or the reverse."""

    source: str = ""
    """Source of the fix: a thread in which it helped, or the vendor's page."""

    least: int = 1
    """How many such lines must appear before they count."""

    instead: frozenset[str] = frozenset()
    """For a pattern with frames: labels of the line that it replaces. A pattern that names none
    counts only where the line shows no other label."""

    @cached_property
    def needs(self) -> regexes.Requirement:
        """Words without which `regex` cannot match."""
        return regexes.NOTHING if self.regex is None else regexes.requirement(self.regex.pattern)

    @cached_property
    def any_of(self) -> frozenset[bytes]:
        """`has`, encoded for the search."""
        return frozenset(word.encode() for word in self.has)

    @cached_property
    def none_of(self) -> frozenset[bytes]:
        """`excludes`, encoded for the search."""
        return frozenset(word.encode() for word in self.excludes)

    @property
    def literals(self) -> frozenset[bytes]:
        """The words that decide whether the regex is searched for."""
        return self.any_of | self.none_of | frozenset(regexes.words_of(self.needs))

    def matches(self, text: str, words: Set[bytes]) -> bool:
        """Whether `text`, lower-cased and cleaned, matches; `words` are the pattern's literals that
        occur in it."""
        if self.any_of.isdisjoint(words) or not self.none_of.isdisjoint(words):
            return False
        return regexes.met(self.needs, words) and self._stands_in(text, words)

    def _stands_in(self, text: str, words: Set[bytes]) -> bool:
        if self.regex is None:
            return True
        if len(text) < _LONG or self._marks is None or self._width is None:
            return self.regex.search(text) is not None
        marks = (word.decode() for word in self._marks & words)
        return any(
            self.regex.search(text, start, end) is not None
            for start, end in regexes.windows(text, marks, self._width)
        )

    @cached_property
    def _marks(self) -> frozenset[bytes] | None:
        return regexes.marks(self.needs)

    @cached_property
    def _width(self) -> int | None:
        return None if self.regex is None else regexes.width(self.regex.pattern)

    def first_word(self, text: str) -> int:
        """Offset of the first of `has` in a long line; 0 where it is near the beginning."""
        if len(text) <= _NEAR:
            return 0
        first = min((at for word in self.has if (at := text.find(word)) >= 0), default=0)
        return first if first > _NEAR else 0


@dataclass(frozen=True, eq=False)
class Benign:
    """A line that looks like an error and is harmless."""

    pattern: Pattern
    cancels: tuple[str, ...]
    """Labels seen shortly before that this line retracts."""

    roles: tuple[str, ...] = ()
    """Retracts only sightings in these roles; in any role where empty."""


@dataclass(frozen=True)
class Fix:
    """One fix for an incident."""

    do: str
    source: str = ""
    """Source of the fix: a thread in which it helped, or the vendor's page."""


@dataclass(frozen=True)
class Label:
    """One kind of incident."""

    name: str
    severity: str
    restart: str
    applies: str
    cause: str
    fixes: tuple[Fix, ...]
    follows: frozenset[str]
    """Labels that cause this one where both are seen."""

    events: frozenset[str]
    """The guard's own events for the same fault; after one of them the incident is reported only
    where the miner ends."""

    overcome_by_steps: bool = False
    """After a mere retry or warning, continued training shows that the fault was overcome."""

    undone_by_losses: bool = False
    """For a non-finite loss: finite losses of later steps show that training recovered."""

    moot_when_finished: bool = False
    """After training has finished this is not an incident: processes are just being cleaned up."""

    role: str = "cause"
    """Default role of the label's patterns."""


class Knowledge:
    """All labels and patterns. Safe from any thread."""

    def __init__(
        self,
        labels: Mapping[str, Label],
        patterns: Sequence[Pattern],
        benign: Sequence[Benign],
        triggers: Sequence[bytes],
    ) -> None:
        self.labels = labels
        self.patterns = tuple(patterns)
        self.entries = (*self.patterns, *(b.pattern for b in benign))
        """Every pattern, including those of benign lines."""

        self.triggers = tuple(triggers)
        """Lower-case words without digits; every line that can match holds at least one."""

        self.causes_by_event: dict[str, list[str]] = {}
        """Labels whose cause one of the guard's own events shows."""

        for name in sorted({p.label for p in patterns if p.role == "cause"}):
            for event in labels[name].events:
                self.causes_by_event.setdefault(event, []).append(name)
        self._framed = sorted((p for p in patterns if p.frames), key=lambda p: "" in p.frames)
        self._search = literal_search(word for entry in self.entries for word in entry.literals)
        self._by_word: dict[bytes, list[Pattern | Benign]] = {}
        entries: list[Pattern | Benign] = [*benign, *patterns]
        for entry in entries:
            pattern = entry.pattern if isinstance(entry, Benign) else entry
            for word in () if pattern.frames else pattern.any_of:
                self._by_word.setdefault(word, []).append(entry)
        self._order = {entry: n for n, entry in enumerate(entries)}
        self._answers: dict[str, list[Pattern] | Benign] = {}
        """Results for recent lines: ranks and restarts print the same ones."""

    def match(self, text: str) -> list[Pattern] | Benign:
        """The matches of a lower-cased, cleaned line: benign, or one pattern per label, causes
        first."""
        answer = self._answers.get(text)
        if answer is None:
            answer = self._look_up(text)
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            if len(text) <= _MAX_ANSWERED_LENGTH:
                self._answers[text] = answer
        return answer

    def _look_up(self, text: str) -> list[Pattern] | Benign:
        words = self._search.find(text.encode(errors="replace"))
        entries = {entry for word in words for entry in self._by_word.get(word, ())}
        found: dict[str, Pattern] = {}
        for entry in sorted(entries, key=self._order.__getitem__):
            if isinstance(entry, Benign):
                if entry.pattern.matches(text, words):
                    return entry
            elif entry.label not in found and entry.matches(text, words):
                found[entry.label] = entry
        return sorted(found.values(), key=lambda p: ROLES.index(p.role))

    def match_in(self, frames: str, text: str, matches: Sequence[Pattern] = ()) -> list[Pattern]:
        """The matches of an exception together with the files of its traceback; `matches` are those
        of the exception alone."""
        words = self._search.find(text.encode(errors="replace"))
        told = {p.label for p in matches}
        for p in self._framed:
            if (
                (p.instead & told if told else not p.instead)
                and any(f in frames for f in p.frames)
                and p.matches(text, words)
            ):
                return [p, *(m for m in matches if m.label not in p.instead | {p.label})]
        return list(matches)


@lru_cache(maxsize=1)
def load() -> Knowledge:
    """The knowledge shipped with the package. Raises BadKnowledge."""
    here = resources.files("miner_guard.incidents")
    files = sorted((f for f in here.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return parse({f.name: f.read_text(encoding="utf-8") for f in files})


def parse(texts: Mapping[str, str]) -> Knowledge:
    """Knowledge from TOML documents by file name. Raises BadKnowledge."""
    labels: dict[str, Label] = {}
    triggers: list[str] = []
    patterns: list[Pattern] = []
    benign: list[Benign] = []
    for file, text in texts.items():
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise BadKnowledge(f"{file}: not valid TOML: {error}") from error
        triggers += document.pop("triggers", [])
        for entry in chain.from_iterable(map(expanded, document.pop("benign", []))):
            where = f"{file}: benign"
            cancels, roles = tuple(entry.get("cancels", ())), tuple(entry.get("roles", ()))
            benign.append(Benign(_pattern(where, "benign", "cause", entry), cancels, roles))
        for name, table in document.items():
            if name in labels:
                raise BadKnowledge(f"{file}: label {name} is defined twice")
            labels[name] = _label(f"{file}: {name}", name, table)
            role = table.get("role", "cause")
            patterns += [
                _pattern(f"{file}: {name}", name, role, entry)
                for entry in chain.from_iterable(map(expanded, table["patterns"]))
            ]
    _check_references(labels, patterns, benign)
    return Knowledge(labels, patterns, benign, _triggers(triggers))


def _label(where: str, name: str, table: Mapping[str, Any]) -> Label:
    known = {
        "severity",
        "restart",
        "applies",
        "role",
        "cause",
        "fixes",
        "follows",
        "events",
        "patterns",
    }
    known |= {"overcome_by_steps", "undone_by_losses", "moot_when_finished"}
    if unknown := set(table) - known:
        raise BadKnowledge(
            f"{where}: unknown key {sorted(unknown)[0]}; allowed: {', '.join(sorted(known))}"
        )
    for key, allowed in (("severity", SEVERITIES), ("restart", RESTARTS), ("applies", APPLIES)):
        if table.get(key) not in allowed:
            raise BadKnowledge(
                f"{where}: {key} is {table.get(key)!r}; allowed: {', '.join(allowed)}"
            )
    for key in ("cause", "fixes", "patterns"):
        if not table.get(key):
            raise BadKnowledge(f"{where}: {key} is missing")
    return Label(
        name,
        table["severity"],
        table["restart"],
        table["applies"],
        table["cause"],
        tuple(_fix(where, entry) for entry in table["fixes"]),
        frozenset(table.get("follows", ())),
        frozenset(table.get("events", ())),
        table.get("overcome_by_steps", False),
        table.get("undone_by_losses", False),
        table.get("moot_when_finished", False),
        table.get("role", "cause"),
    )


def _fix(where: str, entry: str | Mapping[str, str]) -> Fix:
    if isinstance(entry, str):
        return Fix(entry)
    if set(entry) != {"do", "source"}:
        raise BadKnowledge(f"{where}: a fix has the keys {sorted(entry)}; it needs do and source")
    return Fix(entry["do"], entry["source"])


def _pattern(where: str, label: str, role: str, entry: Mapping[str, Any]) -> Pattern:
    if unknown := set(entry) - _PATTERN_KEYS:
        raise BadKnowledge(f"{where}: unknown key {sorted(unknown)[0]} in a pattern")
    has, excludes = tuple(entry.get("has", ())), tuple(entry.get("not", ()))
    if not has or any(len(word) < 2 for word in has):
        raise BadKnowledge(
            f"{where}: a pattern needs `has`, words of two letters at least; it has {has}"
        )
    if loud := [word for word in (*has, *excludes) if word != word.lower()]:
        raise BadKnowledge(f"{where}: {loud[0]!r} has capitals; lines are compared in lower case")
    role = entry.get("role", role)
    if role not in ROLES:
        raise BadKnowledge(f"{where}: role is {role!r}; allowed: {', '.join(ROLES)}")
    try:
        regex = re.compile(entry["regex"]) if "regex" in entry else None
    except re.error as error:
        raise BadKnowledge(f"{where}: regex {entry['regex']!r}: {error}") from error
    if regex is not None and (problem := regexes.superlinear(regex.pattern)):
        raise BadKnowledge(f"{where}: regex {regex.pattern!r} holds {problem}")
    restart = entry.get("restart", "")
    if restart and restart not in RESTARTS:
        raise BadKnowledge(f"{where}: restart is {restart!r}; allowed: {', '.join(RESTARTS)}")
    return Pattern(
        label,
        role,
        has,
        excludes,
        regex,
        tuple(entry.get("frames", ())),
        entry.get("cause", ""),
        entry.get("fix", ""),
        restart,
        entry.get("source", ""),
        entry.get("least", 1),
        frozenset(entry.get("instead", ())),
    )


def _check_references(
    labels: Mapping[str, Label], patterns: Iterable[Pattern], benign: Iterable[Benign]
) -> None:
    for pattern in patterns:
        if strangers := pattern.instead - labels.keys():
            raise BadKnowledge(
                f"{pattern.label}: instead of {sorted(strangers)[0]}, which is not a label"
            )
    for label in labels.values():
        if strangers := label.follows - labels.keys():
            raise BadKnowledge(
                f"{label.name}: follows {sorted(strangers)[0]}, which is not a label"
            )
    for entry in benign:
        if unknown := set(entry.cancels) - labels.keys():
            raise BadKnowledge(f"benign: cancels {sorted(unknown)[0]}, which is not a label")
        if unknown := set(entry.roles) - set(ROLES):
            raise BadKnowledge(f"benign: {sorted(unknown)[0]} is not a role")


def _triggers(words: Iterable[str]) -> tuple[bytes, ...]:
    if wrong := [word for word in words if word != word.lower() or re.search(r"[0-9.+-]|^$", word)]:
        raise BadKnowledge(f"trigger {wrong[0]!r}: lower case, no digits, none of . + -")
    # A search for a word also finds every longer word that contains it.
    return tuple(w.encode() for w in words if not any(other != w and other in w for other in words))
