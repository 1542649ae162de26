"""The known errors, read from the `*.toml` files beside this module.

A file holds one table per label: `severity`, `restart`, `applies`, `role`, `cause`, `fixes`,
`follows`, `events` and `patterns`. A pattern matches a line (lower-cased, without colour codes and
prefixes) that contains one of `has`, none of `not`, and in which `regex` is found. `has` keeps
matching cheap: a line without any of these words is skipped. `servers` names a list of the file's
table `[words]`: a line that names a server must hold one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from importlib import resources

from miner_guard.eventlog.literal_search import LiteralSearch, literal_search
from miner_guard.incidents.parsing import Document, check_expressions, parsed
from miner_guard.incidents.patterns import ROLES, Benign, Pattern

_MAX_ANSWERS = 4096
_MAX_ANSWERED_LENGTH = 400


class Knowledge:
    """All labels and patterns. Safe from any thread."""

    def __init__(self, read: Document) -> None:
        self.labels = labels = read.labels
        self.patterns = patterns = read.patterns
        self.entries = (*patterns, *(b.pattern for b in read.benign))
        """Every pattern, including those of benign lines."""

        self.triggers = read.triggers
        """Lower-case words without digits; every line that can match holds at least one."""

        self.causes_by_event: dict[str, list[str]] = {}
        """Labels whose cause one of the guard's own events shows."""

        for name in sorted({p.label for p in patterns if p.role == "cause"}):
            for event in labels[name].events:
                self.causes_by_event.setdefault(event, []).append(name)
        self._framed = sorted((p for p in patterns if p.frames), key=lambda p: "" in p.frames)
        self._ordered: tuple[Pattern | Benign, ...] = (*read.benign, *patterns)
        self._answers: dict[str, list[Pattern] | Benign] = {}
        """Results for recent lines: ranks and restarts print the same ones."""

    # The three below are made for the first line that holds a trigger.

    @cached_property
    def _search(self) -> LiteralSearch:
        return literal_search(word for entry in self.entries for word in entry.literals)

    @cached_property
    def _by_word(self) -> dict[bytes, list[Pattern | Benign]]:
        found: dict[bytes, list[Pattern | Benign]] = {}
        for entry in self._ordered:
            pattern = entry.pattern if isinstance(entry, Benign) else entry
            for word in () if pattern.frames else pattern.any_of:
                found.setdefault(word, []).append(entry)
        return found

    @cached_property
    def _order(self) -> dict[Pattern | Benign, int]:
        return {entry: n for n, entry in enumerate(self._ordered)}

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
        if len(found) > 1:
            found = {label: p for label, p in found.items() if not p.alone} or found
        return sorted(found.values(), key=lambda p: ROLES.index(p.role))

    def match_in(self, frames: str, text: str, matches: Sequence[Pattern] = ()) -> list[Pattern]:
        """The matches of an exception together with the files of its traceback; `matches` are those
        of the exception alone."""
        words = self._search.find(text.encode(errors="replace"))
        named = {p.label for p in matches if not p.alone}
        for p in self._framed:
            if (
                (p.instead & named if named else not p.instead)
                and not p.any_of.isdisjoint(words)
                and any(f in frames for f in p.frames)
                and p.matches(text, words)
            ):
                others = (
                    m for m in matches if m.label not in p.instead | {p.label} and not m.alone
                )
                return [p, *others]
        return list(matches)


@lru_cache(maxsize=1)
def load() -> Knowledge:
    """The knowledge shipped with the package, whose expressions the tests check. Raises
    BadKnowledge."""
    return Knowledge(parsed(shipped()))


def shipped() -> dict[str, str]:
    """The package's TOML documents by file name."""
    here = resources.files("miner_guard.incidents")
    files = sorted((f for f in here.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name: f.read_text(encoding="utf-8") for f in files}


def parse(texts: Mapping[str, str]) -> Knowledge:
    """Knowledge from TOML documents by file name, with its expressions checked. Raises
    BadKnowledge."""
    known = Knowledge(parsed(texts))
    check_expressions(known.entries)
    return known
