"""Finds the root cause among many sightings: the first real error, by time and causality."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from miner_guard.incidents.knowledge import Knowledge
from miner_guard.incidents.patterns import ROLES
from miner_guard.incidents.sightings import Launched, Passed, Retraction, Seen, Sighting

_KEPT = 4
"""Sightings to keep per label and role; any more are only counted."""

_MAX_RANKS = 1024
_SURVIVED_AFTER = 200
"""If this many lines follow an exception or a retry without an exit, the program is considered to
have recovered."""

_STILL_COPING = 30
"""An unknown exception within this many lines of a reported recovery contradicts the report."""

_MAX_BRIEF_FAILURES = 3
"""If an optional dependency fails fewer times than this while training continues, the outage counts
as transient."""

_EFFECTS = ("summary", "symptom")
"""Roles that do not show why a run ended."""


@dataclass
class SightingHistory:
    """All sightings of one label in one role."""

    kept: list[Sighting] = field(default_factory=list)
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
        """Count a sighting. If a message continues, its longer form replaces the shorter one."""
        if self.recent and self.recent[-1] == sighting.line:
            self.kept = [
                sighting if s.line == sighting.line and sighting.more else s for s in self.kept
            ]
            return
        if (
            self.behind
            and self.count < _MAX_BRIEF_FAILURES
            and sighting.line - self.recent[-1] > _SURVIVED_AFTER
        ):
            self.kept, self.count = [], 0
        self.count += 1
        self.recent.append(sighting.line)
        if len(self.kept) < _KEPT:
            self.kept.append(sighting)
        if sighting.rank is not None and len(self.ranks) < _MAX_RANKS:
            self.ranks.add(sighting.rank)

    def retract(self, line: int, within: int | None) -> list[Sighting]:
        """Remove the sightings in the `within` lines before `line` and return them. If `within` is
        None, remove all sightings before it and return nothing."""
        if within is None:
            self.kept = [s for s in self.kept if s.line > line]
            self.count = len(self.kept)
            return []
        taken = [at for at in self.recent if line - at <= within]
        gone = [s for s in self.kept if s.line in taken]
        self.count -= len(taken)
        self.kept = [s for s in self.kept if s.line not in taken]
        for at in taken:
            self.recent.remove(at)
        return gone


@dataclass(frozen=True)
class Incident:
    """One label found in a log, with its evidence."""

    label: str
    first: Sighting
    kept: Sequence[Sighting]
    """The first few sightings of each role."""

    count: int
    ranks: Sequence[int]
    root: bool


class RootCauseAnalyzer:
    """Collects sightings and can report at any time. Memory use is bounded by the number of
    labels."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._trails: dict[tuple[str, str], SightingHistory] = {}
        self._before: dict[tuple[str, str], SightingHistory] = {}
        """Sightings from the latest earlier launch that had any, if the log marks launches."""

        self._coped: list[tuple[int, list[Sighting]]] = []
        """For each recovery that the program reported, its line and the errors it covers."""

        self._notices = SightingHistory()
        """All notices; they are reported only if nothing happened apart from their effects."""

        self._last = 0

    def add(self, seen: Iterable[Seen]) -> None:
        """Add a scanner's sightings, in order."""
        for item in seen:
            if isinstance(item, Sighting):
                self._see(item)
                continue
            self._last = max(self._last, item.line)
            if isinstance(item, Launched):
                self._launched()
            elif isinstance(item, Retraction):
                self._retract(item)
            elif isinstance(item, Passed):
                for (label, role), trail in self._trails.items():
                    if label in item.labels and role in ("retry", "warning"):
                        trail.passed = item.line

    def _see(self, found: Sighting) -> None:
        if found.role == "notice":
            self._notices.add(found)
            return
        self._last = max(self._last, found.line)
        if self._coped and found.label == "code_bug" and found.role in ("exception", "symptom"):
            # The program did not recover: it failed right after it claimed to, for no other
            # known reason.
            for line, sightings in self._coped:
                if 0 <= found.line - line <= _STILL_COPING:
                    for earlier in sightings:
                        known = earlier._replace(role="cause")
                        self._history(known).add(known)
            self._coped.clear()
        self._history(found).add(found)

    def _history(self, found: Sighting) -> SightingHistory:
        kind = found.label, found.role
        if kind not in self._trails:
            self._trails[kind] = SightingHistory()
        return self._trails[kind]

    def _retract(self, item: Retraction) -> None:
        gone = [
            sighting
            for (label, role), trail in self._trails.items()
            if label in item.labels and (not item.roles or role in item.roles)
            for sighting in trail.retract(item.line, item.within)
            if item.coped
        ]
        if gone:
            self._coped = [*self._coped[-_KEPT + 1 :], (item.line, gone)]

    def _launched(self) -> None:
        """Start a new launch. Once it has sightings, those from the previous launch no longer
        count."""
        self._before = self._trails or self._before
        self._trails = {}

    def incidents(self, lines: int) -> list[Incident]:
        """One entry per label, in log order; at most one of them is the root. `lines` is the log's
        length."""
        trails = {
            key: trail
            for key, trail in (self._trails or self._before).items()
            if trail.kept
            and trail.count >= min(s.least for s in trail.kept)
            and not self._came_back(key[0], trail)
        }
        if lines - self._last > _SURVIVED_AFTER and all(
            role in ("exception", "retry", "hint") for _, role in trails
        ):
            survived = {
                ("code_bug", "exception"),
                *(key for key in trails if key[1] in ("retry", "hint")),
            }
            trails = {key: trail for key, trail in trails.items() if key not in survived}
        if not trails and self._notices.kept:
            label = self._notices.kept[0].label
            trails = {(label, "notice"): self._notices}
        elif (suspect := self._suspect(trails)) is not None:
            trails[suspect.label, "cause"] = history = SightingHistory()
            history.add(suspect._replace(role="cause"))
        root = self._root(trails)
        return sorted(
            (self._incident(label, trails, root) for label in {label for label, _ in trails}),
            key=lambda i: i.first.line,
        )

    def _suspect(self, trails: Mapping[tuple[str, str], SightingHistory]) -> Sighting | None:
        """The notice of a hardware error that explains what follows it, if what follows is only
        effects: ranks that lost a peer, and the end of the run."""
        if not all(role in _EFFECTS for _, role in trails):
            return None
        first = min((trail.kept[0].line for trail in trails.values()), default=0)
        return next(
            (s for s in self._notices.kept if s.restart == "hardware" and s.line < first), None
        )

    def _came_back(self, label: str, trail: SightingHistory) -> bool:
        return (
            trail.behind
            and trail.count < _MAX_BRIEF_FAILURES
            and not self._knowledge.labels[label].overcome_by_steps
        )

    @staticmethod
    def _incident(
        label: str, trails: dict[tuple[str, str], SightingHistory], root: Sighting | None
    ) -> Incident:
        own = [trail for (name, _), trail in trails.items() if name == label]
        kept = sorted((s for trail in own for s in trail.kept), key=lambda s: s.line)
        is_root = root is not None and root.label == label
        return Incident(
            label,
            root if root is not None and is_root else kept[0],
            kept,
            sum(t.count for t in own),
            sorted(set[int]().union(*(t.ranks for t in own))),
            is_root,
        )

    def _root(self, trails: dict[tuple[str, str], SightingHistory]) -> Sighting | None:
        strong = {
            label
            for (label, role), trail in trails.items()
            if role in ("cause", "exception", "retry") and not trail.behind
        }
        candidates = [
            (
                bool(self._knowledge.labels[label].follows & strong - {label}),
                _rank(role, behind=trail.behind),
                trail.kept[0].line,
                order,
            )
            for order, ((label, role), trail) in enumerate(trails.items())
        ]
        if not candidates:
            return None
        order = min(candidates)[3]
        return list(trails.values())[order].kept[0]


def _rank(role: str, *, behind: bool) -> int:
    """How close to the cause a sighting is. Hints and symptoms are equally close, so the earlier
    one wins."""
    return ROLES.index("warning" if behind else "symptom" if role == "hint" else role)
