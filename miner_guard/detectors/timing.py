"""Source 001's timing: the fast log, the breakdown of an evaluation step, and its red flags.

The `monitor` phase encloses the monitoring callback. Overhead is the time in `monitor` minus the
phases nested in it: the time that the callback spends on display and status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miner_guard.config import StepSettings

EVALUATION = ("inference", "val_loss")


@dataclass(frozen=True)
class FastLog:
    """Time spent in a monitoring callback without evaluation, by part."""

    total_s: float
    loss_calc_s: float
    overhead_s: float


@dataclass(frozen=True)
class Breakdown:
    """The time that an evaluation step's callback took, by part."""

    total_s: float
    inference_s: float
    val_loss_s: float
    example_loss_s: float
    overhead_s: float | None
    """None if the miner has no `monitor` phase around the evaluation, so the overhead is
    unknown."""


@dataclass(frozen=True)
class RedFlag:
    """One of source 001's red flags, or a remark on a value that approaches one."""

    which: str
    seen: str
    limit: str
    meaning: str
    remark: bool = False
    """True if the value is outside the range that source 001 expects, but below its red flag."""


class TimingLog:
    """Decides which step gets a timing line: in each stretch of `every` steps, the first step
    with something to report."""

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
    """Source 001's red flags in one timing line, and remarks on values outside the expected
    range."""
    if isinstance(seen, FastLog):
        yield from _beyond(
            "fast log",
            seen.total_s,
            (settings.fast_log_usual_s, settings.fast_log_max_s),
            "something slow is running that should not be",
        )
        return
    if seen.total_s < settings.red_flag_min_s:
        return
    if seen.total_s > settings.evaluation_usual_s:
        yield RedFlag(
            "evaluation",
            f"{seen.total_s:.3f}s",
            f"{settings.evaluation_usual_s:g}s",
            "5-10s is typical: use fewer examples or evaluate less often",
            remark=True,
        )
    for part in _parts(seen, settings):
        yield from part.judge(seen.total_s)


def _beyond(
    which: str, seconds: float, limits: tuple[float, float], meaning: str
) -> Iterator[RedFlag]:
    usual, maximum = limits
    if seconds > usual:
        remark = seconds <= maximum
        yield RedFlag(
            which, f"{seconds:.3f}s", f"{usual if remark else maximum:g}s", meaning, remark
        )


@dataclass(frozen=True)
class _Part:
    """One part of an evaluation step, with its limits as percentages of the step's total."""

    which: str
    seconds: float
    usual_pct: float
    max_pct: float
    remark: str
    red_flag: str

    def judge(self, total_s: float) -> Iterator[RedFlag]:
        share = 100 * self.seconds / total_s
        seen = f"{share:.1f}% of {total_s:.3f}s"
        if share > self.max_pct:
            yield RedFlag(self.which, seen, f"{self.max_pct:g}%", self.red_flag)
        elif share > self.usual_pct:
            yield RedFlag(self.which, seen, f"{self.usual_pct:g}%", self.remark, remark=True)


def _parts(seen: Breakdown, settings: StepSettings) -> Iterator[_Part]:
    """The parts whose share is meaningful: if one part makes up the whole evaluation, its share
    means nothing."""
    if seen.overhead_s is not None:
        yield _Part(
            "overhead",
            seen.overhead_s,
            settings.overhead_good_pct,
            settings.overhead_max_pct,
            "1-5% is typical; optimize the costly parts",
            "inefficient status updates or display",
        )
    if seen.overhead_s is not None or seen.val_loss_s > 0:
        yield _Part(
            "inference",
            seen.inference_s,
            settings.inference_usual_pct,
            settings.inference_max_pct,
            "60-80% is typical: generate fewer or shorter examples",
            "generation may be hanging: check its timeout",
        )
    if seen.inference_s > 0:
        yield _Part(
            "validation",
            seen.val_loss_s,
            settings.val_loss_usual_pct,
            settings.val_loss_max_pct,
            "10-20% is typical: use fewer validation examples",
            "validation set too large or inefficient",
        )
