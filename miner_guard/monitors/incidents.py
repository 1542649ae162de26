"""Incidents: reports each failure in the miner's output once, under its root cause."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard import state_dir
from miner_guard.checks.samplers import oom_kills
from miner_guard.eventlog import catalog
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.eventlog.write_errors import not_stored
from miner_guard.incidents import knowledge, log_text, report
from miner_guard.incidents.oom import Training
from miner_guard.incidents.report import Explained
from miner_guard.incidents.root_cause import Incident, RootCauseAnalyzer
from miner_guard.incidents.scanner import Scanner
from miner_guard.incidents.sightings import Retraction, Seen, Sighting
from miner_guard.monitors import evidence_folders
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.monitors.tail import Tail
from miner_guard.rank import journal
from miner_guard.rank.journal import JournalEntry
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.system import free_memory

SETTLE_S = 2.0
"""After this long without new matches the cascade is complete and its root cause can be
reported."""

MAX_WAIT_S = 10.0
"""Report the root cause after at most this long, even if lines keep arriving."""

CAUSELESS_S = 30.0
"""Wait this long while only symptoms, or reports without a reason, have arrived: the launcher
reports how the lost rank ended only after stopping the others (torchrun gives them 30 s)."""

EPISODE_S = 600.0
"""A match this long after the previous one starts a new incident, unless it is a symptom."""

SYMPTOMS_S = 3600.0
"""A symptom within this time of a reported root belongs to it: ranks notice a lost peer only after
their collective's timeout."""

COOLDOWN_S = 900.0
"""Minimum time between reports of the same label within one launch."""

REMARKS = 3
"""A retried failure counts as an incident after this many occurrences, or when the miner exits."""

_CAUSELESS = ("summary", "symptom", "warning")
_NEVER_OVERCOME = frozenset({"rank_gone"})
"""Guard events that finite losses do not clear: a lost rank never steps again."""

_SEEN = 120
"""How many characters of the matched line to include in the incident's line."""


class IncidentsMonitor(Monitor):
    """Feeds the output to a scanner and reports the root causes."""

    name = "incidents"

    def __init__(
        self, context: Context, count_oom_kills: Callable[[], int | None] = oom_kills
    ) -> None:
        super().__init__(context)
        self._count_oom_kills = count_oom_kills
        self._knowledge = knowledge.load()
        miner = context.config.miner
        self._training = Training(miner.batch_size, miner.effective_batch_size)
        self._counts: Counter[str] = Counter()
        self._latest: Explained | None = None
        self._printed = self._prepared = False
        self._begin()

    def _begin(self) -> None:
        self._scanner, self._case = Scanner(self._knowledge), RootCauseAnalyzer(self._knowledge)
        self._tail = Tail()
        self._first_s: float | None = None
        self._last_s = self._named_s = float("-inf")
        self._reported_at: dict[str, float] = {}
        self._events: set[str] = set()
        self._shown: dict[str, Sighting] = {}
        """Sightings by label, for causes that one of the guard's own events has established."""

        self._finite: dict[int, bool] = {}
        """Whether each rank's last loss was finite."""

        self._root: Explained | None = None
        self._stopping = False
        self._oom_kills = self._count_oom_kills()

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._begin()
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Iterable[Finding]:
        if isinstance(entry, journal.TrainingEntry):
            self._training = Training(
                entry.batch_size, entry.effective_batch_size, entry.world_size
            )
        return ()

    def on_output(self, chunk: bytes) -> Iterable[Finding]:
        if not self.context.config.logs.classify:
            return ()
        self._printed = True
        self._tail.add(chunk)
        seen = self._scanner.feed(chunk)
        if seen:
            now = self.context.clock.monotonic()
            self._take(seen, now)
            self._first_s = now if self._first_s is None else self._first_s
        return self._overcome(seen)

    def _prepare(self) -> None:
        """Load the error patterns. Runs in a job thread."""
        self._knowledge.prepare(free_memory.give_back)

    def _overcome(self, seen: Iterable[Seen]) -> list[Finding]:
        """Findings for reported incidents that training has since recovered from."""
        past = {
            label
            for item in seen
            if isinstance(item, Retraction) and item.within is None
            for label in item.labels
        }
        passed = sorted(past & self._reported_at.keys())
        for label in passed:
            del self._reported_at[label]
        return [make_finding("incident_overcome", label=label) for label in passed]

    def _take(self, seen: list[Seen], now: float) -> None:
        """Add the matches to the case; after a long quiet period, start a new case first."""
        if self._first_s is None and now - self._last_s > EPISODE_S:
            self._case = RootCauseAnalyzer(self._knowledge)
        self._last_s = now
        self._case.add(seen)

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        self._events.add(finding.event)
        if self.context.config.logs.classify:
            # The guard's line counts as evidence, so that this monitor and a scan of the whole log
            # name the same root.
            for label in self._knowledge.shown_by(finding.event):
                sighting = Sighting(
                    label, "cause", self._scanner.line, catalog.message(finding), finding.rank
                )
                self._take([sighting], self.context.clock.monotonic())
                if finding.event not in _NEVER_OVERCOME:
                    self._shown[label] = sighting
        if finding.event == "miner_stopping":
            self._stopping = True
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        loss = steps[-1].loss
        if loss is not None:
            self._finite[rank] = math.isfinite(loss)
        return ()

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        if self._printed and not self._prepared:
            # Load the patterns before the first traceback, and in a job, because this thread would
            # delay the output. Wait for the first output, because loading would slow down a burst.
            self._prepared = True
            self.context.jobs.once("incident knowledge", self._prepare)
        if self._first_s is None or (
            now - self._last_s < SETTLE_S and now - self._first_s < MAX_WAIT_S
        ):
            return ()
        root = self._seen_root()
        if root is not None and root.first.role in _CAUSELESS and now - self._first_s < CAUSELESS_S:
            return ()
        return self._name(now, REMARKS)

    def objection(self) -> str | None:
        if self.context.clock.monotonic() - self._last_s > EPISODE_S:
            return None
        root = self._seen_root()
        return None if root is None or root.first.role in ("retry", "warning") else root.label

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        now = self.context.clock.monotonic()
        self._case.add([*self._scanner.finish(), *self._passed()])
        if end.signal == signal.SIGKILL and not end.asked and self._seen_root() is None:
            # The output does not mention the signal: without a launcher, no process reports it.
            line = "MINER EXITED: signal SIGKILL"
            self._take([Sighting("host_oom_kill", "exit", self._scanner.line, line, None)], now)
        lasting = self._lasting()
        self._case.add(lasting)
        if lasting or now - self._last_s <= EPISODE_S:
            # Report why the miner ended even if the guard has reported what led to it.
            self._events.clear()
        return () if end.asked or end.finished else self._name(now, min_count=1)

    def _passed(self) -> list[Seen]:
        """Causes that the guard reported and training then recovered from, such as a non-finite
        loss."""
        well = [
            label
            for label, sighting in self._shown.items()
            if (
                any(self._finite.values())
                if sighting.rank is None
                else self._finite.get(sighting.rank, False)
            )
        ]
        return [Retraction(tuple(well), self._scanner.line, None, ("cause",))] if well else []

    def _lasting(self) -> list[Seen]:
        """Earlier causes that still hold according to the guard's own measurements. For example, a
        model with NaN weights fails in ways that no pattern covers."""
        root = self._seen_root()
        if root is not None and root.label not in ("code_bug", *self._shown):
            return []
        return [
            sighting
            for sighting in self._shown.values()
            if not (
                all(self._finite.values())
                if sighting.rank is None
                else self._finite.get(sighting.rank, True)
            )
        ]

    def _seen_root(self) -> Incident | None:
        return next((i for i in self._case.incidents(self._scanner.line) if i.root), None)

    def _by_the_kernels_count(self, root: Incident) -> Incident:
        """Attribute a SIGKILL to the OOM killer only if the kernel counted an OOM kill; a line that
        names the OOM killer needs no count."""
        if root.label != "host_oom_kill" or root.first.role != "exit":
            return root
        if (self._count_oom_kills() or 0) > (self._oom_kills or 0):
            return root
        name = "process_killed"
        first = root.first._replace(label=name, cause="", fix="", restart="")
        return replace(root, label=name, first=first, kept=())

    def _name(self, now: float, min_count: int) -> Iterable[Finding]:
        """Report the root cause, unless it has already been reported or is only a retry or warning
        seen fewer than `min_count` times."""
        self._first_s = None
        root = self._seen_root()
        if root is not None:
            root = self._by_the_kernels_count(root)
        if self._stopping or root is None or self._is_known(root, now):
            return ()
        if root.first.role in ("retry", "warning") and root.count < min_count:
            return ()
        self._root = self._latest = explained = report.in_words(
            root, self._knowledge, self._training, self.context.redactor.public
        )
        self._reported_at[root.label] = self._named_s = now
        self._counts[root.label] += 1
        return [self._finding(explained, root)]

    def _is_known(self, root: Incident, now: float) -> bool:
        label = self._knowledge.labels[root.label]
        at = self._reported_at.get(root.label)
        if at is not None and now - at < COOLDOWN_S:
            return True
        if (
            root.first.role in ("symptom", "exit")
            and self._root is not None
            and now - self._named_s < SYMPTOMS_S
        ):
            return True
        return not self._events.isdisjoint(label.events)

    def _finding(self, explained: Explained, root: Incident) -> Finding:
        folder = evidence_folders.folder(
            self.context.state, self.context.clock.wall(), explained.label
        )
        story = {**explained.as_dict(), "count": explained.count, "ranks": list(explained.ranks)}
        output = self._tail.text()
        self.context.jobs.once("incident evidence", lambda: self._store(folder, story, output))
        return make_finding(
            "incident",
            rank=explained.ranks[0] if len(explained.ranks) == 1 else None,
            level="warning" if root.first.role in ("retry", "warning") else explained.severity,
            label=explained.label,
            cause=f"{explained.cause} Seen: {log_text.excerpt(explained.excerpt, _SEEN)}",
            fix=explained.fixes[0],
            fixes=list(explained.fixes),
            excerpt=explained.excerpt,
            restart=explained.restart,
            applies=explained.applies,
            ranks=list(explained.ranks),
            evidence=str(folder),
        )

    def _store(self, folder: Any, story: Mapping[str, Any], output: bytes) -> None:
        """Write the evidence folder. Runs in a job thread."""
        try:
            state_dir.write_json(
                folder / "incident.json", {**story, "status": dict(self.context.status())}
            )
            state_dir.write_atomic(
                folder / "output.log", self.context.redactor.text(output.decode("utf-8", "replace"))
            )
            evidence_folders.prune(self.context.state, self.context.config.logs.keep_incidents)
        except OSError as error:
            self.context.emit(not_stored(f"evidence of {story['label']}", error))

    def snapshot(self) -> Mapping[str, Any]:
        latest = self._latest
        return {
            "classify": self.context.config.logs.classify,
            "root_cause": None if self._root is None else self._root.label,
            "latest": None if latest is None else {**latest.as_dict(), "restart": latest.restart},
            "counts": dict(self._counts),
        }
