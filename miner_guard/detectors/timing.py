"""Source 001's timing: the fast log, the breakdown of an evaluation step, and its red flags.

Phase `monitor` encloses the monitoring callback. Overhead is monitor time less the phases nested in
it: the callback's time for display and status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miner_guard.config import StepSettings

EVALUATION = ("inference", "val_loss")


@dataclass(frozen=True)
class FastLog:
    """Seconds of a monitoring callback without evaluation."""

    total_s: float
    loss_calc_s: float
    overhead_s: float


@dataclass(frozen=True)
class Breakdown:
    """Seconds of an evaluation step's callback."""

    total_s: float
    inference_s: float
    val_loss_s: float
    example_loss_s: float
    overhead_s: float | None
    """None where the miner has no `monitor` phase around the evaluation, so the overhead is
    unknown."""


@dataclass(frozen=True)
class RedFlag:
    """One of source 001's red flags, or what comes before one."""

    which: str
    seen: str
    limit: str
    meaning: str
    remark: bool = False
    """Above what source 001 calls acceptable, below its red flag."""


class TimingLog:
    """Chooses the line for each step: the first step with something to report in each stretch of
    `every` steps."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self._fast_stretch = 0
        self._breakdown_stretch = 0

    def observe(
        self, step: int, phases: Mapping[str, float], nested_in_monitor_s: float
    ) -> FastLog | Breakdown | None:
        """The timing line due at `step` (counted over the run), or None."""
        monitor = phases.get("monitor", 0.0)
        if any(phases.get(name, 0.0) > 0 for name in EVALUATION):
            stretch = step // self._settings.breakdown_every
            if stretch == self._breakdown_stretch:
                return None
            self._breakdown_stretch = stretch
            self._fast_stretch = step // self._settings.fast_log_every
            return breakdown(phases, nested_in_monitor_s)
        stretch = step // self._settings.fast_log_every
        if monitor <= 0 or stretch == self._fast_stretch:
            return None
        self._fast_stretch = stretch
        return FastLog(
            monitor, phases.get("example_loss", 0.0), max(0.0, monitor - nested_in_monitor_s)
        )


def breakdown(phases: Mapping[str, float], nested_in_monitor_s: float) -> Breakdown:
    """The components of an evaluation step. Without a `monitor` phase the total is the sum of the
    known ones."""
    parts = [phases.get(name, 0.0) for name in ("inference", "val_loss", "example_loss")]
    monitor = phases.get("monitor", 0.0)
    if monitor <= 0:
        return Breakdown(sum(parts), parts[0], parts[1], parts[2], None)
    overhead = max(0.0, monitor - nested_in_monitor_s)
    # A component outside the callback still belongs to the evaluation's time.
    return Breakdown(max(monitor, sum(parts) + overhead), parts[0], parts[1], parts[2], overhead)


def red_flags(seen: FastLog | Breakdown, settings: StepSettings) -> Iterator[RedFlag]:
    """Source 001's red flags in one timing line."""
    if isinstance(seen, FastLog):
        if seen.total_s > settings.fast_log_max_s:
            yield RedFlag(
                "fast log",
                f"{seen.total_s:.3f}s",
                f"{settings.fast_log_max_s:g}s",
                "something slow runs when it should not",
            )
        return
    if seen.total_s < settings.red_flag_min_s:
        return
    for which, seconds, limit, meaning in (
        (
            "overhead",
            seen.overhead_s,
            settings.overhead_max_pct,
            "inefficient status updates or display",
        ),
        (
            "inference",
            seen.inference_s,
            settings.inference_max_pct,
            "generation may be hanging: check its timeout",
        ),
        (
            "validation",
            seen.val_loss_s,
            settings.val_loss_max_pct,
            "validation set too large or inefficient",
        ),
    ):
        share = 100 * (seconds or 0.0) / seen.total_s
        told = f"{share:.1f}% of {seen.total_s:.3f}s"
        if share > limit:
            yield RedFlag(which, told, f"{limit:g}%", meaning)
        elif which == "overhead" and share > settings.overhead_good_pct:
            limit, meaning = settings.overhead_good_pct, "1-5% is usual; optimize what is costly"
            yield RedFlag(which, told, f"{limit:g}%", meaning, remark=True)
