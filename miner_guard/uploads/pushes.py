"""Judges what is published: its age, when the next upload is possible and needed, and whether a
reported push arrived. Says how often to report it, and the gate's decisions. Pure: callers pass the
time (monotonic)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.record.events import Event, event
from miner_guard.record.lines import upload_decided
from miner_guard.record.redaction import MASK
from miner_guard.system.clock import OncePer
from miner_guard.validators.facts import Published
from miner_guard.validators.rules import age_now

AGE_EVERY_S = 300.0
STALE_EVERY_S = 600.0
UNKNOWN_EVERY_S = 1800.0
FORECAST_EVERY_S = 900.0
BLOCKED_EVERY_S = 300.0
RECENT_STEPS = 20
"""Number of recent steps whose median is the forecast's step time."""


class RepoWatch:
    """Reports the repo's age, and whether it is stale or unknown.

    Staleness counts monotonic time since the last probe that returned an age, so neither a
    wall-clock step nor unresponsive storage makes a repo look young.
    """

    def __init__(self, settings: GateSettings) -> None:
        self._gate = settings
        self._last_readable: Published | None = None
        self._age = OncePer(AGE_EVERY_S)
        self._stale = OncePer(STALE_EVERY_S)
        self._unknown = OncePer(UNKNOWN_EVERY_S)
        self.latest = Published()

    def age(self, now: float) -> float | None:
        """Seconds since the newest known upload. None if there is no known upload."""
        return None if self._last_readable is None else age_now(self._last_readable, now)

    def is_stale(self, now: float) -> bool:
        """Return whether the repo is known to be past its limit."""
        age = self.age(now)
        return age is not None and age > self._gate.repo_age_limit_s

    def observe(self, published: Published, now: float) -> Iterator[Event]:
        """Process the result of a probe."""
        self.latest = published
        if published.age_s is None:
            reason = (
                self._emptied() if published.empty else published.reason or "no reason was given"
            )
            if reason is not None and self._unknown.ask(now, reason):
                text = f"Repo Age: unknown: {reason}"
                yield event("repo_age", "warning", text, age_s=None, reason=reason)
            # Report the age immediately once the repo is readable again: until then, the last line
            # about the repo says "unknown".
            self._age.clear()
            return
        self._unknown.clear()
        self._last_readable = published
        age = age_now(published, now)
        due = age is not None and age > self._gate.repo_age_target_s
        if self._age.ask(now, due):
            yield event(
                "repo_age",
                "info",
                f"Repo Age: {age:.0f}s (keep < {self._gate.repo_age_target_s:.0f}s)",
                age_s=age,
                target_s=self._gate.repo_age_target_s,
                revision=published.revision,
                due=due,
            )
        yield from self.tick(now)

    def _emptied(self) -> str | None:
        last = self._last_readable
        return (
            None
            if last is None
            else f"nothing is published now (last seen: {last.revision or 'a revision'})"
        )

    def tick(self, now: float) -> Iterator[Event]:
        """Report what changes only because time has passed."""
        age = self.age(now)
        if age is None or not self.is_stale(now):
            self._stale.clear()
        elif self._stale.ask(now):
            old = f"{age:.0f}s" if age < 6000 else f"{age / 3600:.1f} h"
            yield event(
                "repo_stale",
                "critical",
                f"REPO STALE: the published upload is {old} old (limit "
                f"{self._gate.repo_age_limit_s:.0f}s); upload now",
                age_s=age,
                limit_s=self._gate.repo_age_limit_s,
                reason=self.latest.reason,
            )


class ForecastWatch:
    """The forecast, starting with the first step whose duration is meaningful."""

    def __init__(self, settings: GateSettings) -> None:
        self._gate = settings
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._announced = OncePer(FORECAST_EVERY_S)
        self.minimum: int | None = None
        """The first inner step that the gate allows; None until a step has been timed."""

    @property
    def step_s(self) -> float | None:
        """The median duration of the recent steps; None before the first that counts."""
        return statistics.median(self._recent) if self._recent else None

    def step(
        self,
        outer_step: int | None,
        inner_step: int | None,
        seconds: float,
        *,
        first: bool,
        age_s: float | None,
        now: float,
    ) -> Iterator[Event]:
        """Process the end of an inner step, when the repo is `age_s` old. The duration of a
        launch's `first` step does not count, because that step compiles and fills caches."""
        if not first:
            self._recent.append(seconds)
        self.minimum = None
        step_s, required = self.step_s, self._gate.min_inner_step
        if inner_step is None or step_s is None or age_s is None:
            return
        eta_s = max(required - inner_step, 0) * step_s
        stale_s = max(self._gate.repo_age_limit_s - age_s, 0.0)
        self.minimum = required
        # A repo that is already stale has its own report and needs no forecast.
        if eta_s > stale_s > 0 and self._announced.ask(now, outer_step):
            yield event(
                "upload_forecast",
                "warning",
                f"UPLOAD FORECAST: inner_step {required} in {eta_s / 60:.0f} min, repo stale in "
                f"{stale_s / 60:.0f} min",
                min_inner_step=required,
                eta_min=eta_s / 60,
                stale_min=stale_s / 60,
                inner_step=inner_step,
                outer_step=outer_step,
                step_time_s=step_s,
            )


def note_of(decision: Mapping[str, Any], step_s: float | None = None) -> str | None:
    """Who demands what, beyond the verdicts' sentences; with the duration of a step, also how long
    until a retry can help."""
    notes = [str(v["note"]) for v in decision.get("verdicts") or () if v.get("note")]
    steps = decision.get("retry_after_steps")
    if notes and steps and step_s is not None:
        notes[0] += f": {steps * step_s / 60:.0f} min to go"
    return "; ".join(notes) or None


_DECIDED = (
    *("reason", "outer_step", "inner_step", "kind", "verdicts", "decision_id"),
    *("due", "stale", "shadow", "retry_after_steps", "retry_after_s", "note"),
)
"""Fields of a decision that its event includes, in order."""


_PROGRESS = frozenset({"min_inner_step"})
"""A block by this rule alone ends with the next steps: progress, nothing to warn of."""


class DecisionNotifier:
    """Turns decisions into events. Reports the first block and every change immediately, and a
    repeated block every five minutes; of permissions, the first of an outer step, since each upload
    has a line of its own."""

    def __init__(self) -> None:
        self._blocked = OncePer(BLOCKED_EVERY_S)
        self._allowed = OncePer(math.inf)

    def say(self, decision: Mapping[str, Any], now: float) -> Event | None:
        """The decision's event, or None if this block was already reported."""
        verdicts = decision.get("verdicts") or []
        fields: dict[str, Any] = {name: decision.get(name) for name in _DECIDED}
        if decision.get("allowed") and not decision.get("shadow"):
            self._blocked.clear()
            warned = [v.get("rule") for v in verdicts if v.get("outcome") == "warn"]
            new = self._allowed.ask(now, (fields["outer_step"], fields["kind"], warned))
            level = "info" if new else "debug"
            return upload_decided(level, fields, self._blocked.take_left_out(), allowed=True)
        rules = frozenset(v.get("rule") for v in verdicts if v.get("outcome") == "block")
        block = (rules, fields["kind"], fields["outer_step"], bool(decision.get("shadow")))
        if not self._blocked.ask(now, block):
            return None
        self._allowed.clear()
        allowed, level = bool(decision.get("allowed")), "info" if rules <= _PROGRESS else "warning"
        return upload_decided(level, fields, self._blocked.take_left_out(), allowed=allowed)


# did a reported push arrive?
#
# Upstream never checks the exit code of its upload worker: a crashed one still logs `Successfully
# pushed`.

_SLACK_S = 5.0
"""Tolerance in seconds: server timestamps are in whole seconds, and the probe itself takes a
moment."""


@dataclass(frozen=True)
class Reported:
    """A push, as reported."""

    outer_step: int | None
    inner_step: int | None
    since_start_s: float | None
    """Seconds from the start of the push to the probe after it; None if a log reported only the
    end."""

    checksum: str | None = None
    """Checksum that the repo reported to the miner for the gradients, if any."""


@dataclass(frozen=True)
class Verification:
    """The conclusion from the probe after the push."""

    verified: bool | None
    """None if undecidable: the repo is unreadable, or already shows a later push."""

    detail: str
    superseded: bool = False
    """A later outer step was published before the probe."""


def verify(before: Published | None, after: Published, reported: Reported) -> Verification:
    """Compare the repo after a push with the report, and with the repo before it if known."""
    if after.empty:
        return Verification(False, "the repo is empty")
    if after.age_s is None:
        return Verification(None, f"the repo could not be read: {after.reason}")
    if (still := _not_moved(before, after, reported)) is not None:
        return Verification(False, still)
    # A higher step counts only if published since the push began: an earlier run may have left it.
    if None not in (after.outer_step, reported.outer_step) and (after.outer_step or 0) > (
        reported.outer_step or 0
    ):
        later = after.revision or f"outer step {after.outer_step}"
        return Verification(None, f"followed by {later} before it was checked", superseded=True)
    if (
        doubt := _other_steps(after, reported) or _other_content(before, after, reported)
    ) is not None:
        return Verification(False, doubt)
    unplaced = reported.since_start_s is None and reported.inner_step is None
    if unplaced and moved_by(before, after) is None:
        words = "neither the repo's state before the push nor the push's start time is known"
        return Verification(None, words)
    size = "size unknown" if after.size_bytes is None else f"{after.size_bytes} bytes"
    sum_ = "no checksum" if after.checksum is None else f"checksum {after.checksum[:12]}"
    return Verification(True, f"gradients {after.age_s:.0f}s old, {size}, {sum_}")


def moved_by(before: Published | None, after: Published) -> float | None:
    """Seconds by which LastModified moved between two probes; None if either lacks an age."""
    if before is None or before.age_s is None or before.seen_at is None:
        return None
    if after.age_s is None or after.seen_at is None:
        return None
    return (after.seen_at - after.age_s) - (before.seen_at - before.age_s)


def _not_moved(before: Published | None, after: Published, reported: Reported) -> str | None:
    if after.size_bytes == 0:
        return "the gradients file is empty"
    words = f"LastModified did not change: the gradients are {after.age_s:.0f}s old"
    if reported.since_start_s is not None:
        began = f", but the push began {reported.since_start_s:.0f}s ago"
        young = (after.age_s or 0.0) <= reported.since_start_s + _SLACK_S
        return None if young else words + began
    moved = moved_by(before, after)
    # The earlier probe may already have seen the reported push, because it ran after the files
    # arrived but before the log line.
    if moved is None or moved > _SLACK_S or _shows(after, reported):
        return None
    return f"{words}, as before"


def _shows(after: Published, reported: Reported) -> bool:
    """Return whether the repo names the reported steps."""
    named = (after.outer_step, after.inner_step)
    return named == (reported.outer_step, reported.inner_step) != (None, None)


def _other_steps(after: Published, reported: Reported) -> str | None:
    for what, published, told in (
        ("outer step", after.outer_step, reported.outer_step),
        ("inner step", after.inner_step, reported.inner_step),
    ):
        # Upstream writes the root metadata last, with the inner step at that moment: a later step
        # is fine, an earlier one is not.
        if published is not None and told is not None and published < told:
            return f"metadata.json says {what} {published}, not {told} as the miner reported"
    return None


def _other_content(before: Published | None, after: Published, reported: Reported) -> str | None:
    if after.checksum is None:
        return None
    steps = (after.outer_step, after.inner_step)
    if (
        before is not None
        and before.checksum == after.checksum
        and (before.outer_step, before.inner_step) != steps
    ):
        return (
            f"the gradients did not change: same checksum {after.checksum[:12]} as before, "
            "although the step differs"
        )
    expected = reported.checksum
    if expected is None or MASK in expected or not _shows(after, reported):
        return None
    # A report may hold only a prefix of the checksum.
    if after.checksum.startswith(expected) or expected.startswith(after.checksum):
        return None
    return f"the gradients have checksum {after.checksum[:12]}, but the miner read {expected[:12]}"
