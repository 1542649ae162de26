"""Finds the root cause among many sightings: the first real error, by time and causality, of the
last attempt in the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from miner_guard.incidents.knowledge import ROLES, Knowledge
from miner_guard.record.words import GONE, IN_SHUTDOWN

_FEW = 4
"""Sightings to keep per label and role; any more are only counted."""

_MAX_RANKS = 1024
_MAX_ATTEMPTS = 20
_SURVIVED_AFTER = 200
"""If this many lines follow an exception or a retry without an exit, the program is considered to
have recovered."""

_MAX_BRIEF_FAILURES = 3
"""If an optional dependency fails fewer times than this while training continues, the outage counts
as transient."""


class Sighting(NamedTuple):
    """A line that indicates a label."""

    label: str
    role: str
    line: int
    """Line number, starting at 1."""

    text: str
    rank: int | None
    cause: str = ""
    """The pattern's cause, if it differs from the label's."""

    fix: str = ""
    """Copied from the pattern, like `restart`, `source` and `least`."""

    restart: str = ""
    source: str = ""
    least: int = 1

    frame: str = ""
    """For an exception, `logs.Ended.where`."""


@dataclass(frozen=True)
class Retraction:
    """A line that retracts recent sightings, because the program recovered from the error or
    raised a different one."""

    labels: tuple[str, ...]
    line: int
    within: int | None = 30
    """How many lines back to retract; None means back to the beginning."""

    roles: tuple[str, ...] = ()
    """Roles of the sightings to retract; empty means all roles."""

    needed: bool = True
    """Whether training needs what failed. If not, it has continued without it: the sightings stay,
    but did not cause any later exit."""


@dataclass(frozen=True)
class Launched:
    """A new attempt begins; earlier sightings belong to the previous one."""

    line: int


Evidence = Union[Sighting, Retraction, Launched]


@dataclass
class _Trail:
    """All sightings of one label in one role."""

    first: list[Sighting] = field(default_factory=list)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    """Line numbers of the latest sightings, in case of a retraction."""

    count: int = 0
    ranks: set[int] = field(default_factory=set)

    passed: int = 0
    """The latest line after which training is known to have continued; 0 if unknown."""

    @property
    def behind(self) -> bool:
        """Whether training continued after the latest sighting."""
        return bool(self.recent) and self.recent[-1] <= self.passed

    def add(self, sighting: Sighting) -> None:
        """Count a sighting, once a line."""
        if self.recent and self.recent[-1] == sighting.line:
            return
        self.count += 1
        self.recent.append(sighting.line)
        if len(self.first) < _FEW:
            self.first.append(sighting)
        if sighting.rank is not None and len(self.ranks) < _MAX_RANKS:
            self.ranks.add(sighting.rank)

    def retract(self, line: int, within: int | None) -> None:
        """Remove the sightings in the `within` lines before `line`, or all if `within` is None."""
        if within is None:
            self.first = [s for s in self.first if s.line > line]
            self.count = len(self.first)
            return
        taken = [at for at in self.recent if line - at <= within]
        self.count -= len(taken)
        self.first = [s for s in self.first if s.line not in taken]
        for at in taken:
            self.recent.remove(at)


_Trails = dict[tuple[str, str], _Trail]
"""By label and role."""


@dataclass(frozen=True)
class Incident:
    """One label found in a log, with its evidence."""

    label: str
    first: Sighting
    sightings: Sequence[Sighting]
    """The first few sightings of each role."""

    count: int
    ranks: Sequence[int]
    root: bool


class RootCauseAnalyzer:
    """Collects evidence and can report at any time. Memory use is bounded by the number of
    labels."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._trails: _Trails = {}
        self._attempts: deque[_Trails] = deque(maxlen=_MAX_ATTEMPTS)
        """Earlier attempts that had sightings, oldest first."""

        self._notices = _Trail()
        """All notices; they are reported only if nothing happened apart from their effects."""

        self._last = 0

    def add(self, evidence: Iterable[Evidence]) -> None:
        """Add a scanner's evidence, in order."""
        for item in evidence:
            if isinstance(item, Sighting):
                self._see(item)
                continue
            self._last = max(self._last, item.line)
            if isinstance(item, Launched):
                if any(trail.first for trail in self._trails.values()):
                    self._attempts.append(self._trails)
                self._trails = {}
            else:
                self._recovered(item)

    def _recovered(self, item: Retraction) -> None:
        for (label, role), trail in self._trails.items():
            if label not in item.labels or (item.roles and role not in item.roles):
                continue
            if item.needed:
                trail.retract(item.line, item.within)
            else:
                trail.passed = item.line

    def _see(self, sighting: Sighting) -> None:
        if sighting.role == "notice":
            self._notices.add(sighting)
            return
        self._last = max(self._last, sighting.line)
        if self._waits_for_a_failed_rank(sighting):
            sighting = sighting._replace(role="symptom")
        self._trails.setdefault((sighting.label, sighting.role), _Trail()).add(sighting)

    def _waits_for_a_failed_rank(self, sighting: Sighting) -> bool:
        """Whether the ranks hang because one of them has ended: what ended it came before."""
        ended = f"{IN_SHUTDOWN} for" in sighting.text or GONE in sighting.text
        return (
            sighting.label == "hang"
            and ended
            and any(
                role in ("cause", "exception", "exit")
                and trail.first
                and sighting.line - max(trail.recent, default=0) <= _SURVIVED_AFTER
                for (_, role), trail in self._trails.items()
            )
        )

    def incidents(self, lines: int) -> list[Incident]:
        """One entry per label of the last attempt, in log order, after the roots of earlier
        attempts. At most one of them is the root. `lines` is the log's length."""
        earlier = list(self._attempts)
        trails = self._trails if any(t.first for t in self._trails.values()) else {}
        # An attempt that shows nothing wrong does not show why it had to be started.
        current = trails or (earlier.pop() if earlier else {})
        roots = [self._root(self._valid(trails)) for trails in earlier]
        past = [Incident(s.label, s, (s,), 1, (), False) for s in roots if s is not None]
        return past + self._judge(current, lines)

    def _judge(self, trails: _Trails, lines: int) -> list[Incident]:
        trails = self._valid(trails)
        if lines - self._last > _SURVIVED_AFTER and all(
            role in ("exception", "retry") for _, role in trails
        ):
            trails = {
                (label, role): trail
                for (label, role), trail in trails.items()
                if role != "retry" and label != "code_bug"
            }
        if not trails and self._notices.first:
            trails = {(self._notices.first[0].label, "notice"): self._notices}
        root = self._root(trails)
        labels = {label for label, _ in trails}
        return sorted(
            (_incident(label, trails, root) for label in labels), key=lambda i: i.first.line
        )

    def _valid(self, trails: _Trails) -> _Trails:
        return {
            key: trail
            for key, trail in trails.items()
            if trail.first
            and trail.count >= min(s.least for s in trail.first)
            and not self._came_back(key[0], trail)
        }

    def _came_back(self, label: str, trail: _Trail) -> bool:
        brief = trail.behind and trail.count < _MAX_BRIEF_FAILURES
        return brief and not self._knowledge.labels[label].overcome_by_steps

    def _root(self, trails: _Trails) -> Sighting | None:
        strong = {label for label, role in trails if role in ("cause", "exception", "retry")}
        ranked = [
            (
                bool(self._knowledge.labels[label].follows & strong - {label}),
                ROLES.index("warning" if trail.behind else role),
                trail.first[0].line,
                order,
            )
            for order, ((label, role), trail) in enumerate(trails.items())
        ]
        return list(trails.values())[min(ranked)[3]].first[0] if ranked else None


def _incident(label: str, trails: _Trails, root: Sighting | None) -> Incident:
    matching = [trail for (name, _), trail in trails.items() if name == label]
    sightings = sorted((s for trail in matching for s in trail.first), key=lambda s: s.line)
    is_root = root is not None and root.label == label
    return Incident(
        label,
        root if root is not None and is_root else sightings[0],
        sightings,
        sum(trail.count for trail in matching),
        sorted(set[int]().union(*(trail.ranks for trail in matching))),
        is_root,
    )
