"""What is known of errors, read from the `*.toml` files beside this module.

A file holds one table per label: `severity`, `restart`, `applies`, `role`, `cause`, `fixes`,
`follows`, `events` and `patterns`. A pattern matches a line (lower-cased, without colour codes and
prefixes) that contains one of `has`, none of `not`, and in which `regex` is found. `has` is what
makes it cheap: a line that holds none of these words is never looked at.
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

ROLES = ("cause", "uncaught", "remark", "ending", "report", "symptom", "warned")
"""What a line can be in the course of events, the nearest to the cause first.

`cause` says what broke. `uncaught` is an exception or signal that ended a rank. `remark` is
something that was tried again. `ending` says how a process ended. `report` is the program's own
word that it failed, without a reason. `symptom` is what others saw of it, `warned` what they only
warned of.
"""

RESTARTS = ("transient", "outage", "once", "hardware", "config", "never")
"""What the restart policy may do after this root cause.

`transient`: it may pass by itself; restart with backoff. `outage`: the same, with the longer waits
that a service somewhere else needs to come back. `once`: try again, but the same label again soon
means that a restart does not fix it. `hardware`: restart only where the startup checks pass.
`config`: a person must change something first; tried once anyway, since a line may be
misread. `never`: it was asked to stop.
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
"""Characters of a line that are shown with what comes after them."""

_LONG = 1024
"""Characters from which on an expression is searched for only around the words that it needs."""

_MAX_ANSWERS = 4096
_MAX_ANSWERED_LENGTH = 400


class BadKnowledge(Exception):
    """A knowledge file is wrong; the message names file, label and key."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way in which a label shows itself in a line."""

    label: str
    role: str
    has: tuple[str, ...]
    excludes: tuple[str, ...]
    regex: re.Pattern[str] | None
    frames: tuple[str, ...] = ()
    """Where given, only the last line of a traceback counts, through a file whose path holds one of
    these.

    An empty one stands for any path, or none, and is asked last.
    """

    cause: str = ""
    """Said instead of the label's cause, where this line proves less or more."""

    fix: str = ""
    """Put before the label's fixes, where this line says more exactly what to do. `{path|default}`
    stands for a detail of the line (`details.py`), and for the default where the line does not name
    it; so in the label's fixes."""

    restart: str = ""
    """Instead of the label's, where what this line shows passes by itself and the rest does not, or
    the reverse."""

    source: str = ""
    """Where the fix comes from: a thread in which it helped, or the vendor's page."""

    least: int = 1
    """Lines like this that must be seen before they count."""

    instead: frozenset[str] = frozenset()
    """Of one with frames: labels of the line that it takes the place of. One that names none counts
    only where the line shows nothing else."""

    @cached_property
    def needs(self) -> regexes.Requirement:
        """Words without which `regex` cannot match."""
        return regexes.NOTHING if self.regex is None else regexes.requirement(self.regex.pattern)

    @cached_property
    def any_of(self) -> frozenset[bytes]:
        """`has`, as a search finds it."""
        return frozenset(word.encode() for word in self.has)

    @cached_property
    def none_of(self) -> frozenset[bytes]:
        """`excludes`, as a search finds it."""
        return frozenset(word.encode() for word in self.excludes)

    @property
    def literals(self) -> frozenset[bytes]:
        """The words that decide whether the regex is searched for."""
        return self.any_of | self.none_of | frozenset(regexes.words_of(self.needs))

    def matches(self, text: str, words: Set[bytes]) -> bool:
        """Whether `text`, lower-cased and cleaned, shows it; `words` are those of its literals that
        stand in it."""
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
        """Where in a long line the first of `has` stands; 0 where it is near the beginning."""
        if len(text) <= _NEAR:
            return 0
        first = min((at for word in self.has if (at := text.find(word)) >= 0), default=0)
        return first if first > _NEAR else 0


@dataclass(frozen=True, eq=False)
class Benign:
    """A line that sounds bad and is not."""

    pattern: Pattern
    cancels: tuple[str, ...]
    """Labels seen just before that this line takes back."""

    roles: tuple[str, ...] = ()
    """Only what was seen in one of these roles is taken back; in any, where none exists."""


@dataclass(frozen=True)
class Fix:
    """One thing to do against an incident."""

    do: str
    source: str = ""
    """Where it comes from: a thread in which it helped, or the vendor's page."""


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
    """Labels that this one is a consequence of, where both are seen."""

    events: frozenset[str]
    """The guard's own events that say the same; after one of them the incident is reported only
    where the miner ends."""

    overcome_by_steps: bool = False
    """Where it was only tried again or warned of, training that continues shows that it was
    overcome."""

    undone_by_losses: bool = False
    """A loss that was no number: those of later steps that are numbers show that training got over
    it."""

    moot_when_finished: bool = False
    """After training has said that it is finished it is no incident: somebody cleans up."""

    role: str = "cause"
    """Of its patterns that name none."""


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
        """Every pattern, those of benign lines too."""

        self.triggers = tuple(triggers)
        """Lower-case words without digits of which every line that can match holds one."""

        self.causes_by_event: dict[str, list[str]] = {}
        """Labels of which an event of the guard's own shows the cause."""

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
        """Of recent lines: ranks and restarts print the same ones."""

    def match(self, text: str) -> list[Pattern] | Benign:
        """What a lower-cased, cleaned line shows: that it is benign, or patterns, one a label,
        causes first."""
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
        """What an exception shows together with the files of its traceback; `matches` is what it
        shows by itself."""
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
    """The knowledge that comes with the program. Raises BadKnowledge."""
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
                f"{pattern.label}: instead of {sorted(strangers)[0]}, which is no label"
            )
    for label in labels.values():
        if strangers := label.follows - labels.keys():
            raise BadKnowledge(f"{label.name}: follows {sorted(strangers)[0]}, which is no label")
    for entry in benign:
        if unknown := set(entry.cancels) - labels.keys():
            raise BadKnowledge(f"benign: cancels {sorted(unknown)[0]}, which is no label")
        if unknown := set(entry.roles) - set(ROLES):
            raise BadKnowledge(f"benign: {sorted(unknown)[0]} is no role")


def _triggers(words: Iterable[str]) -> tuple[bytes, ...]:
    if wrong := [word for word in words if word != word.lower() or re.search(r"[0-9.+-]|^$", word)]:
        raise BadKnowledge(f"trigger {wrong[0]!r}: lower case, no digits, none of . + -")
    # A word that contains another one is found by it.
    return tuple(w.encode() for w in words if not any(other != w and other in w for other in words))
