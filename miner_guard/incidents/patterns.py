"""What the knowledge files describe: patterns of lines, labels, fixes and harmless lines."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

from miner_guard.incidents import regexes

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

SEVERITIES = ("info", "warning", "error", "critical")
APPLIES = ("rank", "node", "job")


_SERVER = re.compile(r"host=\\?['\"]|https?://|connect call failed \('|connect to host ")
"""How a line names a server."""

_NEAR = 300
"""Characters shown of a line together with the lines after it."""

_LONG = 1024
"""Longer texts are searched only around the words that the expression needs."""


class BadKnowledge(Exception):
    """A knowledge file is invalid; the message names file, label and key."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """One form in which a label appears in a line."""

    label: str
    role: str
    has: tuple[str, ...]
    excludes: tuple[str, ...]
    expression: str | None
    """The regular expression that must be found too."""

    servers: tuple[str, ...] = ()
    """If set, a line that names a server must hold one of these words: those of the servers meant.
    """

    alone: bool = False
    """Counts only where the line shows no other label: a failure that any server may have."""

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
    def regex(self) -> re.Pattern[str] | None:
        """`expression`, compiled for the first line that needs it: all of them together take half
        of the guard's start."""
        return None if self.expression is None else re.compile(self.expression)

    @cached_property
    def needs(self) -> regexes.Requirement:
        """Words without which `expression` cannot match."""
        return regexes.NOTHING if self.expression is None else regexes.requirement(self.expression)

    @cached_property
    def any_of(self) -> frozenset[bytes]:
        """`has`, encoded for the search."""
        return frozenset(word.encode() for word in self.has)

    @cached_property
    def none_of(self) -> frozenset[bytes]:
        """`excludes`, encoded for the search."""
        return frozenset(word.encode() for word in self.excludes)

    @cached_property
    def _server_words(self) -> frozenset[bytes]:
        return frozenset(word.encode() for word in self.servers)

    @property
    def literals(self) -> frozenset[bytes]:
        """The words that decide whether the regex is searched for."""
        needed = frozenset(regexes.words_of(self.needs))
        return self.any_of | self._server_words | self.none_of | needed

    def matches(self, text: str, words: Set[bytes]) -> bool:
        """Whether `text`, lower-cased and cleaned, matches; `words` are the pattern's literals that
        occur in it."""
        if self.any_of.isdisjoint(words) or not self.none_of.isdisjoint(words):
            return False
        if self.servers and self._server_words.isdisjoint(words) and _SERVER.search(text):
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
        return None if self.expression is None else regexes.width(self.expression)

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
