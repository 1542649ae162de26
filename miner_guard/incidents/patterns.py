"""What the knowledge files describe: patterns of lines, labels, fixes and harmless lines."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

from miner_guard.incidents import regexes

ROLES = ("cause", "exception", "retry", "exit", "summary", "symptom", "hint", "warning", "notice")
"""The role of a line in the course of events; the role nearest to the cause comes first.

`cause` names the fault. `exception` is an exception or signal that ended a rank. `retry` is an
operation that was retried. `exit` reports how a process ended. `summary` is the program's
statement that it failed, without a reason. `symptom` is the effect on others; `hint`, as near to
the cause, an error line that only the general layer knows. `warning` only warns of the fault.
`notice` stops nothing and asks for nothing now: it answers only where nothing else happened, and
the running guard ignores it.
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


_SERVER = regexes.RegexSearch(r"host=\\?['\"]|https?://|connect call failed \('|connect to host ")
"""How a line names a server."""

_NEAR = 300
"""How many characters to show of a line together with the lines after it."""


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
    """A regular expression that must match as well."""

    servers: tuple[str, ...] = ()
    """If set, a line that names a server must contain one of these words, which identify the
    servers in question.
    """

    alone: bool = False
    """Counts only if the line shows no other label: the failure may be any server's."""

    frames: tuple[str, ...] = ()
    """If set, the pattern counts only for the last line of a traceback that passes through a file
    whose path contains one of these strings.

    An empty string matches any traceback, even one without paths, and is tried last.
    """

    cause: str = ""
    """Replaces the label's cause when this line proves more, or less, than that cause states."""

    fix: str = ""
    """Comes before the label's fixes if this line allows a more exact one. `{path|default}` stands
    for a detail of the line (`details.py`), or for the default if the line lacks it; the label's
    fixes may use it too."""

    restart: str = ""
    """Replaces the label's `restart` if this line's fault is transient and the label's other faults
    are not, or the reverse."""

    source: str = ""
    """Source of the fix: a thread in which it helped, or the vendor's page."""

    least: int = 1
    """How many such lines must appear before they count."""

    instead: frozenset[str] = frozenset()
    """For a pattern with frames: which of the line's other labels it replaces. A pattern that names
    no labels here counts only if the line shows no other label."""

    through: tuple[str, ...] = ()
    """If set, the same for a traceback whose frames show one of these strings: in a path, in a
    function's name after `, in `, or in a source line."""

    @property
    def says_little(self) -> bool:
        """Whether any traceback, or none, would do."""
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
        """`has`, encoded for the search."""
        return frozenset(word.encode() for word in self.has)

    @cached_property
    def none_of(self) -> frozenset[bytes]:
        """`excludes`, encoded for the search."""
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
        """Whether two texts may match differently although the same literals occur in both and they
        differ only in digits."""
        return self.search is not None and self.search.tells_digits_apart

    def possible(self, words: Set[bytes]) -> bool:
        """Whether a text may match if `words` are those of the pattern's literals that occur in
        it."""
        return (
            not self.any_of.isdisjoint(words)
            and self.none_of.isdisjoint(words)
            and (self.search is None or regexes.met(self.search.needs, words))
        )

    def matches(self, text: str, words: Set[bytes]) -> bool:
        """Whether `text`, lower-cased and cleaned, matches. Call it only if `possible` returns
        True."""
        if self.search is not None and not self.search.found_in(text, self.has, words):
            return False
        others = self.servers and self._server_words.isdisjoint(words)
        return not (others and _SERVER.found_in(text))

    def first_word(self, text: str) -> int:
        """Offset of the first `has` word in a long line; 0 if it is near the beginning."""
        if len(text) <= _NEAR:
            return 0
        first = min((at for word in self.has if (at := text.find(word)) >= 0), default=0)
        return first if first > _NEAR else 0


@dataclass(frozen=True, eq=False)
class Benign:
    """A line that looks like an error but is harmless."""

    pattern: Pattern
    cancels: tuple[str, ...]
    """Labels whose sightings shortly before this line it retracts."""

    roles: tuple[str, ...] = ()
    """Retracts only sightings in these roles; in any role if empty."""

    notice: str = ""
    """Label that this line is a notice about, if any."""


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
    """Labels that cause this one if both are seen."""

    events: frozenset[str]
    """The guard's own events for the same fault; after one of them, the incident is reported only
    if the miner ends."""

    overcome_by_steps: bool = False
    """If the fault shows only as a retry or warning, continued training proves that the program
    overcame it."""

    undone_by_losses: bool = False
    """For a non-finite loss: finite losses in later steps show that training recovered."""

    moot_when_finished: bool = False
    """After training has finished this is not an incident: processes are just being cleaned up."""

    role: str = "cause"
    """Default role of the label's patterns."""
