"""How far a run is: time to the next upload and the end of the outer step, throughput, and what its
time went to.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from miner_guard.config import GateSettings, MinerSettings
from miner_guard.rank.journal import JournalEntry, TrainingEntry
from miner_guard.rank.layout import StepRecord
from miner_guard.watch.base import Context, Events, Monitor


@dataclass(frozen=True)
class TrainingFacts:
    """Training settings from the hook, which takes precedence, or from the configuration; None if
    unknown."""

    batch_size: int | None = None
    effective_batch_size: int | None = None
    world_size: int | None = None
    accumulation_steps: int | None = None
    params: int | None = None
    upload_steps: int | None = None
    inner_steps_per_outer: int | None = None
    tokens_per_step: int | None = None
    min_inner_step: int = 0

    @staticmethod
    def from_settings(miner: MinerSettings, gate: GateSettings) -> TrainingFacts:
        return TrainingFacts(
            batch_size=miner.batch_size,
            effective_batch_size=miner.effective_batch_size,
            upload_steps=miner.upload_steps,
            min_inner_step=gate.min_inner_step,
        )

    def with_entry(self, entry: TrainingEntry) -> TrainingFacts:
        """These facts, updated with the hook's `training` entry."""
        shared = {each.name for each in fields(self)} & {each.name for each in fields(entry)}
        counts = {name: value for name in shared if _is_count(value := getattr(entry, name))}
        return replace(self, **counts)

    def tokens_per_s(self, tokens: int | None, step_time_s: float | None) -> float | None:
        """Tokens per second, from the step's token count, else from the settings."""
        count = tokens if tokens is not None else self.tokens_per_step
        return count / step_time_s if count is not None and step_time_s else None

    def eta_s(
        self, inner_step: int | None, step_time_s: float | None, since_s: float, *, outer: bool
    ) -> float | None:
        """Return the seconds until the next outer step, or until the miner's next upload; None if
        unknown. `since_s` is the time since the last step ended.

        The miner uploads at multiples of `upload_steps` once the gate's minimum is reached. If the
        cadence is unknown, this is the time to the minimum.
        """
        if inner_step is None or not step_time_s:
            return None
        least = self.min_inner_step
        if outer:
            target = self.inner_steps_per_outer
        elif self.upload_steps is None:
            target = least if inner_step < least else None
        else:
            target = max(1, -(-max(inner_step + 1, least) // self.upload_steps)) * self.upload_steps
        return None if target is None else max(0.0, (target - inner_step) * step_time_s - since_s)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class FactsMonitor(Monitor):
    """Base class of the monitors that use the training settings."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.facts = TrainingFacts.from_settings(context.config.miner, context.config.gate)

    def on_entry(self, rank: int, entry: JournalEntry) -> Events:
        if isinstance(entry, TrainingEntry):
            self.facts = self.facts.with_entry(entry)
        return ()


CATEGORIES = (
    "training",
    "data",
    "upload",
    "allreduce",
    "load_state",
    "pause",
    "evaluation_and_monitoring",
    "hang",
    "restart",
    "init",
)

_PHASES = ("data", "upload", "allreduce", "load_state", "pause")
_RECENT_STEPS = 64
_EXPECTED_FACTOR = 2.0
"""An unfinished step counts as training up to this multiple of the longest recent step."""

_MIN_RECENT, _STALL_FACTOR = 8, 4.0
"""With at least so many recent steps, the training part of a step beyond this multiple of their
median was a stall, except for the median itself."""

_EVALUATION = ("inference", "val_loss", "example_loss")


class Goodput:
    """Adds up one rank's wall time by category, in seconds. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._accounted: float | None = None
        self._launches = 0
        self._stepped = False
        self._hung = False
        self._finished = self._exited = False
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def restore(self, shares: Mapping[str, float], whole_s: float, now: float) -> None:
        """Continue at `now` where a guard that is gone stopped, in the same launch."""
        self.seconds.update({name: whole_s * share for name, share in shares.items()})
        self._accounted, self._launches, self._stepped = now, 1, True

    def launched(self, now: float) -> None:
        """Record that the miner was started; the time since the last step was lost to the
        restart."""
        if self._accounted is None:
            self._accounted = now
        else:
            self._spend("restart", now)
        self._launches += 1
        self._stepped = self._hung = self._finished = self._exited = False

    def step(self, step: StepRecord, monitored_s: float) -> None:
        """Add a step, of which `monitored_s` were spent in tracked operations."""
        start, end = step.start, step.end
        if self._accounted is None:
            self._accounted = start
        if not self._stepped:
            self._spend("init" if self._launches <= 1 else "restart", start)
            self._stepped = True
        if self._hung:
            # The hang cleared without a restart.
            self._spend("hang", start)
            self._hung = False
        length = end - self._accounted
        if length <= 0:
            return
        parts = split(length, step.phases, step.nested_in_monitor_s, monitored_s)
        if len(self._recent) >= _MIN_RECENT:
            usual = statistics.median(self._recent)
            if parts["training"] > _STALL_FACTOR * usual:
                parts["hang"] = parts["training"] - usual
                parts["training"] = usual
        self._recent.append(length)
        for name, seconds in parts.items():
            self.seconds[name] += seconds
        self._accounted = end

    def hang_found(self) -> None:
        """Count the time since the last step as a hang."""
        self._hung = True

    def exited(self, now: float, *, finished: bool) -> None:
        """Record that the miner exited. If it had not finished, the time since its last step is
        lost."""
        self._finished, self._exited = finished, not finished
        if self._accounted is not None and not finished:
            self._spend("hang" if self._hung else "restart", now)

    def shares(self, now: float, phase: str = "") -> tuple[dict[str, float], float]:
        """Share of wall time by category up to `now`, and that time in seconds; `phase` is the
        rank's current phase. Empty before the launch."""
        if self._accounted is None:
            return {}, 0.0
        totals = dict(self.seconds)
        if not self._finished:
            open_s = max(0.0, now - self._accounted)
            totals[self._category(phase, open_s)] += open_s
        whole = sum(totals.values())
        shares = {name: seconds / whole for name, seconds in totals.items()} if whole > 0 else {}
        return shares, whole

    def _category(self, phase: str, open_s: float) -> str:
        if self._hung and not self._exited:
            return "hang"
        if not self._stepped:
            return "init" if self._launches <= 1 else "restart"
        if self._exited:
            return "restart"
        if phase in _PHASES:
            return phase
        if phase == "monitor" or phase in _EVALUATION:
            return "evaluation_and_monitoring"
        overdue = self._recent and open_s > _EXPECTED_FACTOR * max(self._recent)
        return "hang" if overdue else "training"

    def _spend(self, category: str, until: float) -> None:
        assert self._accounted is not None
        if until > self._accounted:
            self.seconds[category] += until - self._accounted
            self._accounted = until


def split(
    length: float, phases: Mapping[str, float], nested_in_monitor_s: float, monitored_s: float = 0.0
) -> dict[str, float]:
    """Seconds that a step spent in each category; time outside all phases and tracked operations
    counts as training. Overlapping phases are scaled down to fit."""
    parts = {name: phases[name] for name in _PHASES if phases.get(name, 0.0) > 0}
    evaluation = sum(phases.get(name, 0.0) for name in _EVALUATION)
    monitoring = phases.get("monitor", 0.0) + max(0.0, evaluation - nested_in_monitor_s)
    monitoring = max(monitoring, monitored_s)
    if monitoring > 0:
        parts["evaluation_and_monitoring"] = monitoring
    claimed = sum(parts.values())
    if claimed > length:
        parts = {name: seconds * length / claimed for name, seconds in parts.items()}
    parts["training"] = max(0.0, length - claimed)
    return parts
