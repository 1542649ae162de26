"""What the knowledge files define: line patterns, labels, fixes and harmless lines."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

from miner_guard.incidents import regexes

ROLES = ("cause", "exception", "retry", "exit", "summary", "symptom", "hint", "warning", "notice")
"""A line's role in the course of an incident, ordered from nearest to the cause to farthest.

`cause` names the fault. `exception` is an exception or signal that ended a rank. `retry` is an
operation that was retried. `exit` reports how a process ended. `summary` is the program's
statement that it failed, without a reason. `symptom` is the effect on others. `hint` is an error
line that only the general layer recognizes; it ranks with `symptom`. `warning` only warns of the
fault. `notice` stops nothing and needs no action now: it is reported only if nothing else happened
or only its effects, and the running guard ignores it.
"""

RESTARTS = ("transient", "outage", "once", "hardware", "config", "never")
"""What the restart policy may do after this root cause.

`transient`: the fault may clear by itself; restart with backoff. `outage`: restart with a longer
backoff, so that a remote service has time to recover. `once`: restart, but if the same label
recurs soon, a restart does not fix it. `hardware`: restart only if the startup checks pass.
`config`: a person must change something first; restart once anyway, since the guard may have
misread a line. `never`: the stop was requested.
"""

SEVERITIES = ("info", "warning", "error", "critical")
APPLIES = ("rank", "node", "job")


_SERVER = regexes.RegexSearch(r"host=\\?['\"]|https?://|connect call failed \('|connect to host ")
"""What precedes a server's name in a log line."""

_NEAR = 300
"""Maximum number of characters to show of a line and the lines after it."""


class BadKnowledge(Exception):
    """A knowledge file is invalid. The message names the file, the label and the key."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way in which a label shows up in a line."""

    label: str
    role: str
    has: tuple[str, ...]
    excludes: tuple[str, ...]
    expression: str | None
    """A regular expression that must also match."""

    servers: tuple[str, ...] = ()
    """If set, a line that names a server must contain one of these words, which identify the
    servers in question.
    """

    alone: bool = False
    """Counts only if the line shows no other label, since any server may have failed."""

    frames: tuple[str, ...] = ()
    """If set, the pattern counts only for the last line of a traceback that passes through a file
    whose path contains one of these strings.

    An empty string matches any traceback, even one without paths, and is tried last.
    """

    cause: str = ""
    """Replaces the label's cause if this line proves more or less than that cause claims."""

    fix: str = ""
    """A more precise fix for this line, listed before the label's fixes. `{path|default}` stands
    for a detail in the line (see `details.py`), or for the default if the line does not contain
    it. The label's fixes may use it too."""

    restart: str = ""
    """Replaces the label's `restart` if this line's fault is transient and the label's other faults
    are not, or vice versa."""

    source: str = ""
    """Source of the fix: a thread where it helped, or the vendor's page."""

    least: int = 1
    """How many of these lines must appear before they count."""

    instead: frozenset[str] = frozenset()
    """For a pattern with frames, which of the line's other labels it replaces. If empty, the
    pattern counts only if the line shows no other label."""

    through: tuple[str, ...] = ()
    """If set, the frames of the traceback must also contain one of these strings: in a path, in a
    function name after `, in `, or in a source line."""

    @property
    def says_little(self) -> bool:
        """Whether the pattern matches with any traceback, or without one."""
        return "" in self.frames and not self.through

    @cached_property
    def search(self) -> regexes.RegexSearch | None:
        """The search for `expression`."""
        return None if self.expression is None else regexes.RegexSearch(self.expression)

    @property
    def needs(self) -> regexes.Requirement:
        """Words without which `expression` cannot match."""
        return regexes.NOTHING if self.search is None else self.search.needs

    @cached_property
    def any_of(self) -> frozenset[bytes]:
        """The words in `has` as bytes."""
        return frozenset(word.encode() for word in self.has)

    @cached_property
    def none_of(self) -> frozenset[bytes]:
        """The words in `excludes` as bytes."""
        return frozenset(word.encode() for word in self.excludes)

    @cached_property
    def _server_words(self) -> frozenset[bytes]:
        return frozenset(word.encode() for word in self.servers)

    @cached_property
    def literals(self) -> frozenset[bytes]:
        """The words that decide whether to search for the regex."""
        needed = frozenset(regexes.words_of(self.needs))
        return self.any_of | self._server_words | self.none_of | needed

    @property
    def tells_digits_apart(self) -> bool:
        """Whether two texts that contain the same literals and differ only in digits may match
        differently."""
        return self.search is not None and self.search.tells_digits_apart

    def possible(self, words: Set[bytes]) -> bool:
        """Whether a text may match. `words`: all literals that occur in it."""
        return (
            not self.any_of.isdisjoint(words)
            and self.none_of.isdisjoint(words)
            and (self.search is None or regexes.met(self.search.needs, words))
        )

    def matches(self, text: str, words: Set[bytes]) -> bool:
        """Whether a lower-cased, cleaned text matches. Call only if `possible` returns True."""
        if self.search is not None and not self.search.found_in(text, self.has, words):
            return False
        others = self.servers and self._server_words.isdisjoint(words)
        return not (others and _SERVER.found_in(text))

    def first_word(self, text: str) -> int:
        """Offset of the first `has` word in a long line; 0 if that word is near the beginning."""
        if len(text) <= _NEAR:
            return 0
        first = min((at for word in self.has if (at := text.find(word)) >= 0), default=0)
        return first if first > _NEAR else 0


@dataclass(frozen=True, eq=False)
class Benign:
    """A line that looks like an error but is harmless."""

    pattern: Pattern
    cancels: tuple[str, ...]
    """Labels whose sightings just before this line are retracted."""

    roles: tuple[str, ...] = ()
    """Roles of the sightings to retract; empty means all roles."""

    notice: str = ""
    """The label that this line is a notice about, if any."""


@dataclass(frozen=True)
class Fix:
    """One fix for an incident."""

    do: str
    source: str = ""
    """Source of the fix: a thread where it helped, or the vendor's page."""


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
    """Labels that are the cause of this one if both appear."""

    events: frozenset[str]
    """The guard's own events for the same fault. After one of them, the incident is reported only
    if the miner ends."""

    overcome_by_steps: bool = False
    """Whether continued training proves that the program recovered from the fault, if it showed up
    only as a retry or warning."""

    undone_by_losses: bool = False
    """For a non-finite loss, whether finite losses in later steps show that training recovered."""

    moot_when_finished: bool = False
    """Not an incident once training has finished, when processes are just being cleaned up."""

    role: str = "cause"
    """Default role of the label's patterns."""
