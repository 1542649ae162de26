"""Judges what is published: its age, when the next upload is possible and needed, and whether a
reported push arrived. Says how often to report it, and the gate's decisions. Pure: callers pass the
time (monotonic)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.record.events import Event, event
from miner_guard.record.lines import upload_decided
from miner_guard.record.redaction import MASK
from miner_guard.system.once import OncePer
from miner_guard.validators.facts import Published
from miner_guard.validators.files import mixed
from miner_guard.validators.limits import Limits
from miner_guard.validators.rules import age_now, minimum_inner_step


@dataclass(frozen=True)
class Forecast:
    """The time until training reaches the minimum and until the repo goes stale, both in seconds
    from now."""

    min_inner_step: int
    eta_s: float
    stale_s: float
    accepted_from: int | None = None
    """The lowest inner step that validators accept; None if no profile defines it."""

    waiting_costs_s: float | None = None
    """While the published upload is an AllReduce's archive: how many more seconds the miner goes
    without a score because it waits for the operator's minimum rather than the validators'. None if
    no time is lost or the number is unknown."""

    @property
    def late(self) -> bool:
        """Whether the repo will go stale before training reaches the minimum."""
        return self.eta_s > self.stale_s


def forecast(
    *,
    inner_step: int,
    step_s: float,
    min_inner_step: int,
    age_s: float,
    limit_s: float,
    accepted_from: int | None = None,
    unscored: bool = False,
) -> Forecast:
    """The forecast after `inner_step` inner steps of `step_s` seconds, for a repo `age_s` old.

    `unscored`: validators give the published files no score, so each step of waiting earns nothing.
    """
    steps = max(min_inner_step - inner_step, 0)
    costs = None
    if unscored and accepted_from is not None:
        needed = max(accepted_from - inner_step, 0)
        costs = max(steps - needed, 0) * step_s
    stale_s = max(limit_s - age_s, 0.0)
    return Forecast(min_inner_step, steps * step_s, stale_s, accepted_from, costs)


AGE_EVERY_S = 300.0
STALE_EVERY_S = 600.0
UNKNOWN_EVERY_S = 1800.0
FORECAST_EVERY_S = 900.0
BLOCKED_EVERY_S = 300.0
STEPS_KEPT = 20
"""Number of recent steps whose median is the forecast's step time."""


class RepoWatch:
    """Reports the repo's age, and whether it is stale or unknown.

    Staleness counts monotonic time since the last probe that returned an age, so neither a
    wall-clock step nor unresponsive storage makes a repo look young.
    """

    def __init__(self, settings: GateSettings) -> None:
        self._gate = settings
        self._known: Published | None = None
        self._age = OncePer(AGE_EVERY_S)
        self._stale = OncePer(STALE_EVERY_S)
        self._unknown = OncePer(UNKNOWN_EVERY_S)
        self.latest = Published()

    def age(self, now: float) -> float | None:
        """Seconds since the newest known upload. None if there is no known upload."""
        return None if self._known is None else age_now(self._known, now)

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
                yield event("repo_unknown", "warning", f"REPO UNKNOWN: {reason}", reason=reason)
            # Report the age immediately once the repo is readable again: until then, the last line
            # about the repo says "unknown".
            self._age.clear()
            return
        self._unknown.clear()
        self._known = published
        age = age_now(published, now)
        due = age is not None and age > self._gate.repo_age_target_s
        if self._age.ask(now, (published.revision, due)):
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
        last = self._known
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
            yield event(
                "repo_stale",
                "critical",
                f"REPO STALE: {age:.0f}s since the last verified upload (limit "
                f"{self._gate.repo_age_limit_s:.0f}s); upload now",
                age_s=age,
                limit_s=self._gate.repo_age_limit_s,
                reason=self.latest.reason,
            )


class ForecastWatch:
    """The forecast, starting with the first step whose duration is meaningful."""

    def __init__(self, settings: GateSettings, limits: Limits) -> None:
        self._gate = settings
        self._limits = limits
        self._recent: deque[float] = deque(maxlen=STEPS_KEPT)
        self._announced = OncePer(FORECAST_EVERY_S)
        self.latest: Forecast | None = None

    def step(
        self,
        outer_step: int | None,
        inner_step: int | None,
        seconds: float,
        *,
        first: bool,
        age_s: float | None,
        now: float,
        published_inner_step: int | None = None,
    ) -> Iterator[Event]:
        """Process the end of an inner step. The duration of a launch's `first` step does not count,
        because that step compiles and fills caches. `published_inner_step` is the repo's."""
        if not first:
            self._recent.append(seconds)
        self.latest = None
        if inner_step is None or not self._recent or age_s is None:
            return
        step_s = statistics.median(self._recent)
        self.latest = ahead = forecast(
            inner_step=inner_step,
            step_s=step_s,
            min_inner_step=minimum_inner_step(self._limits, published_inner_step),
            age_s=age_s,
            limit_s=self._gate.repo_age_limit_s,
            accepted_from=self._limits.validator_min_inner_step,
            unscored=published_inner_step == 0,
        )
        if not ahead.late or ahead.stale_s == 0:
            # A repo that is already stale has its own report and needs no forecast.
            return
        if self._announced.ask(now, outer_step):
            yield event(
                "upload_forecast",
                "warning",
                f"UPLOAD FORECAST: inner_step {ahead.min_inner_step} in "
                f"{ahead.eta_s / 60:.0f} min, repo stale in {ahead.stale_s / 60:.0f} min",
                min_inner_step=ahead.min_inner_step,
                eta_min=ahead.eta_s / 60,
                stale_min=ahead.stale_s / 60,
                inner_step=inner_step,
                outer_step=outer_step,
                step_time_s=step_s,
            )


def note_of(verdicts: Sequence[Mapping[str, Any]]) -> str | None:
    """Extra information from the verdicts, beyond their sentences."""
    return "; ".join(str(v["note"]) for v in verdicts if v.get("note")) or None


_DECIDED = (
    *("reason", "outer_step", "inner_step", "kind", "verdicts", "decision_id"),
    *("due", "stale", "shadow", "retry_after_steps", "retry_after_s"),
)
"""Fields of a decision that its event includes, in order."""


class DecisionNotifier:
    """Turns decisions into events. Reports the first block and every change immediately, and a
    repeated block every five minutes."""

    def __init__(self) -> None:
        self._blocked = OncePer(BLOCKED_EVERY_S)

    def say(self, decision: Mapping[str, Any], now: float) -> Event | None:
        """The decision's event, or None if this block was already reported."""
        verdicts = decision.get("verdicts") or []
        fields: dict[str, Any] = {name: decision.get(name) for name in _DECIDED}
        fields |= {"verdicts": verdicts, "note": note_of(verdicts)}
        if decision.get("allowed") and not decision.get("shadow"):
            self._blocked.clear()
            return upload_decided("info", fields, self._blocked.take_left_out(), allowed=True)
        rules = frozenset(v.get("rule") for v in verdicts if v.get("outcome") == "block")
        block = (rules, fields["kind"], fields["outer_step"], bool(decision.get("shadow")))
        if not self._blocked.ask(now, block):
            return None
        allowed = bool(decision.get("allowed"))
        return upload_decided("warning", fields, self._blocked.take_left_out(), allowed=allowed)


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

    tag: str | None = None
    size_bytes: int | None = None
    """Total size of all files, if the reporter knew it."""

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
    torn = mixed(after.metadata, after.size_bytes, after.checksum)
    doubts = (
        _other_steps(after, reported),
        _same_content(before, after),
        _other_content(after, reported),
        torn,
    )
    for doubt in doubts:
        if doubt is not None:
            return Verification(False, doubt)
    if (
        reported.since_start_s is None
        and moved_by(before, after) is None
        and reported.inner_step is None
    ):
        return Verification(
            None, "neither the repo's state before the push nor the push's start time is known"
        )
    size = "size unknown" if after.size_bytes is None else f"{after.size_bytes} bytes"
    sum_ = "no checksum" if after.checksum is None else f"checksum {after.checksum[:12]}"
    return Verification(True, f"gradients {after.age_s:.0f}s old, {size}, {sum_}")


def moved_by(before: Published | None, after: Published) -> float | None:
    """Seconds by which LastModified moved between two probes; None if either lacks an age."""
    if before is None or None in (before.age_s, before.seen_at, after.age_s, after.seen_at):
        return None
    assert before.age_s is not None
    assert before.seen_at is not None
    assert after.age_s is not None
    assert after.seen_at is not None
    return (after.seen_at - after.age_s) - (before.seen_at - before.age_s)


def _not_moved(before: Published | None, after: Published, reported: Reported) -> str | None:
    assert after.age_s is not None
    if after.size_bytes == 0:
        return "the gradients file is empty"
    if reported.since_start_s is not None:
        if after.age_s <= reported.since_start_s + _SLACK_S:
            return None
        ages = (
            f"the gradients are {after.age_s:.0f}s old, but the push began "
            f"{reported.since_start_s:.0f}s ago"
        )
        return f"LastModified did not change: {ages}"
    moved = moved_by(before, after)
    if moved is not None and moved <= _SLACK_S and not _is_that(after, reported):
        return f"LastModified did not change: the gradients are {after.age_s:.0f}s old, as before"
    return None


def _is_that(after: Published, reported: Reported) -> bool:
    """Return whether the earlier probe already saw the reported push, because it ran after the
    files arrived but before the log line. Compares the steps."""
    return (
        (after.outer_step, after.inner_step)
        == (reported.outer_step, reported.inner_step)
        != (None, None)
    )


def _other_steps(after: Published, reported: Reported) -> str | None:
    if (
        None not in (reported.outer_step, after.outer_step)
        and after.outer_step != reported.outer_step
    ):
        return (
            f"metadata.json says outer step {after.outer_step}, not {reported.outer_step} as the "
            "miner reported"
        )
    # Upstream writes the root metadata last, with the inner step at that moment: a later step is
    # fine, an earlier one is not.
    if (
        reported.inner_step is not None
        and after.inner_step is not None
        and after.inner_step < reported.inner_step
    ):
        return (
            f"metadata.json says inner step {after.inner_step}, not {reported.inner_step} as the "
            "miner reported"
        )
    return None


def _same_content(before: Published | None, after: Published) -> str | None:
    if before is None or before.checksum is None or after.checksum != before.checksum:
        return None
    if (before.outer_step, before.inner_step) == (after.outer_step, after.inner_step):
        return None
    return (
        f"the gradients did not change: same checksum {after.checksum[:12]} as before, although "
        "the step differs"
    )


def _other_content(after: Published, reported: Reported) -> str | None:
    same_push = (after.outer_step, after.inner_step) == (reported.outer_step, reported.inner_step)
    if (
        not same_push
        or after.checksum is None
        or reported.checksum is None
        or MASK in reported.checksum
    ):
        return None
    # A report may hold only a prefix of the checksum.
    if after.checksum.startswith(reported.checksum) or reported.checksum.startswith(after.checksum):
        return None
    return (
        f"the gradients have checksum {after.checksum[:12]}, but the miner read "
        f"{reported.checksum[:12]}"
    )
