"""Checkpoints: what the ranks report, when the newest is too old, and which one to resume from."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping

from miner_guard.rank.journal import CheckpointEntry, EventEntry, JournalEntry
from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, degraded, event
from miner_guard.system.clock import Once
from miner_guard.watch.base import Context, Events, Exit, Launch, Monitor

_MISSED = 1.5
"""A checkpoint is late after this multiple of the time between the last two: a miner that saves
every two hours is not late after one."""


def _stale(detail: str, rank: int | None = None) -> Event:
    text = f"CHECKPOINT STALE: {detail}"
    return event("checkpoint", "warning", text, rank=rank, detail=detail)


class ReportsMonitor(Monitor):
    """Logs the events and checkpoints in the ranks' journals. Reports once when the newest
    checkpoint is too old and, whenever the miner exits, which checkpoint to resume from."""

    name = "reports"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._newest: CheckpointEntry | None = None
        self._saved_at = self._at = 0.0
        """When the newest was saved, and from when its age counts."""

        self._interval_s = 0.0
        self._finished = False
        self._reported = Once()

    def on_launch(self, launch: Launch) -> Events:
        # A launch loads the checkpoint first: count its age from then, or every restart would raise
        # an alarm.
        self._at = launch.started
        self._reported.clear()
        return ()

    def on_entry(self, rank: int, entry: JournalEntry) -> Events:
        if isinstance(entry, CheckpointEntry):
            yield from self._saved(rank, entry)
        elif isinstance(entry, EventEntry):
            odd = f"rank {rank} reported {entry.event!r} with a level, text or fields that no "
            yield Event.from_json(entry.to_json(), rank) or degraded(odd + "event has")

    def _saved(self, rank: int, entry: CheckpointEntry) -> Iterator[Event]:
        path = entry.path
        if not entry.complete:
            yield _stale(f"{path} was reported as incomplete", rank)
            return
        now, before = self.context.clock.monotonic(), self._newest
        self._interval_s = 0.0 if before is None else now - self._at
        self._newest, self._at, self._saved_at = entry, now, now
        self._reported.clear()
        took = "" if entry.seconds is None else f" in {entry.seconds:.2f}s"
        yield event(
            "checkpoint",
            "info",
            f"CHECKPOINT SAVED: {path}{took}",
            rank=rank,
            path=path,
            step=entry.step,
            seconds=entry.seconds,
            size_bytes=entry.size_bytes,
        )

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Events:
        limit = max(self.context.config.health.checkpoint_max_age_s, _MISSED * self._interval_s)
        age_s = now - self._at
        if self._newest is not None and age_s > limit and self._reported.first():
            yield _stale(
                f"the newest checkpoint ({self._newest.path}, step {self._newest.step}) is "
                f"{age_s:.0f}s old (limit {limit:.0f}s); a restart would lose that much training"
            )

    def on_exit(self, end: Exit) -> Events:
        self._finished = end.finished
        if end.finished:
            return ()
        snapshot = self._newest_snapshot()
        saved_step = -1 if self._newest is None else self._newest.step or 0
        if snapshot is not None and snapshot[0] > saved_step:
            step, path, age_s = snapshot
            return (_last(path, step, age_s),)
        if self._newest is None:
            return ()
        age_s = self.context.clock.monotonic() - self._saved_at
        return (_last(self._newest.path, self._newest.step, age_s),)

    def _newest_snapshot(self) -> tuple[int, str, float] | None:
        """Step, path and age of the newest snapshot that all of this node's ranks have: the next
        launch resumes it (`miner_guard.checkpoints` gives each rank's file its name last)."""
        ranks = Counter(file.parent for file in self.context.state.memory.glob("step-*/rank-*.pt"))
        newest = max(ranks, key=lambda folder: (ranks[folder], folder.name), default=None)
        if newest is None or not newest.name[5:].isdigit():
            return None
        age_s = max(self.context.clock.wall() - newest.stat().st_mtime, 0.0)
        return int(newest.name[5:]), str(newest), age_s

    def on_stop(self) -> Events:
        # In-memory checkpoints allow a quick resume between launches. Free them here: nothing else
        # does after the guard exits.
        freed, newest = self._newest_snapshot(), self._newest
        shutil.rmtree(self.context.state.memory, ignore_errors=True)
        if freed is None or self._finished:
            return
        path = None if newest is None else newest.path
        text = f"LAST CHECKPOINT: {path or 'the newest one on disk'}; "
        text += f"the guard has stopped, so its snapshot in memory, of step {freed[0]}, is gone"
        yield event("checkpoint", "info", text, path=path, step=newest and newest.step)


def _last(path: str, step: int | None, age_s: float) -> Event:
    """Source 003's advice after an interruption: resume from the last checkpoint, at this path."""
    which = "" if step is None else f"step {step}, "
    return event(
        "checkpoint",
        "info",
        f"LAST CHECKPOINT: {which}saved {age_s:.0f}s before the end at {path}; resume training "
        "from it",
        path=path,
        step=step,
        age_s=age_s,
    )
