"""Judges whether GPU memory use suits the model's size (source 002) and how it changes over time.
Pure. A reading is a percentage of the GPU's memory; the caller supplies the time and step of each
reading.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from miner_guard.config import GpuSettings
from miner_guard.detectors.model_sizes import LARGE, SMALL, UNKNOWN
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.system.once import OncePer

MIDDLE_PCT = 60.0
"""Source 002's matrix splits the 50-70 % range here."""

STABLE_POINTS = 2.0
"""A spread of up to this many percentage points counts as stable ("GPU stable at 75-76%")."""

HISTORY = 256
"""Number of checks to keep: about ten hours at one check every 150 s."""


@dataclass(frozen=True)
class Row:
    """One row of source 002's decision matrix."""

    minimum: float
    below: float
    sizes: tuple[str, ...]
    factor: float
    """Multiplier for the batch: 2 severe, 1.5 optional, 1 unchanged."""

    verdict: str
    level: str = "info"


_ANY = (SMALL, LARGE, UNKNOWN)
_SET_NAME = "set gpu.model_name"

_WARN_EVERY_S = 6 * 3600.0

_GOOD_AMOUNT = Row(
    0.0,
    0.0,
    _ANY,
    1.0,
    "is enough on a large GPU: {good:.0f} GB at full utilization is good. Proceeding",
)
"""Not a row of source 002's matrix, which covers GPUs of up to 24 GB."""


def matrix(settings: GpuSettings) -> tuple[Row, ...]:
    """The decision matrix with the settings' limits. The optimal range includes its upper end."""
    severe, optimal, near = settings.severe_pct, settings.optimal_pct, settings.near_limit_pct
    past_near = near + 1e-9
    middle, end = MIDDLE_PCT, float("inf")
    return (
        Row(
            0.0,
            severe,
            _ANY,
            2.0,
            "is LOW for {model}. Severe underutilization: increase the batch 2x",
            "warning",
        ),
        Row(
            severe,
            middle,
            (SMALL,),
            1.0,
            "is acceptable for {model}. Proceeding without adjustment",
        ),
        Row(
            severe,
            middle,
            (LARGE,),
            1.5,
            "is LOW for {model}. Should be {goal}; increasing the batch 1.5x is optional",
            "warning",
        ),
        Row(
            severe,
            middle,
            (UNKNOWN,),
            1.0,
            "is acceptable for a small model, LOW for a large one; "
            f"the model's size is unknown: {_SET_NAME}",
        ),
        Row(middle, optimal, (SMALL,), 1.0, "is good for {model}. Proceeding"),
        Row(
            middle,
            optimal,
            (LARGE,),
            1.0,
            "is suboptimal for {model}, which should be at {goal}. Proceeding",
        ),
        Row(
            middle,
            optimal,
            (UNKNOWN,),
            1.0,
            "is good for a small model, suboptimal for a large one; "
            f"the model's size is unknown: {_SET_NAME}",
        ),
        Row(optimal, past_near, _ANY, 1.0, "is optimal for {model}. Proceeding"),
        Row(
            past_near,
            end,
            _ANY,
            1.0,
            "is near the limit for {model}. Proceeding, but close to running out of memory",
        ),
    )


def decide(share_pct: float, size: str, settings: GpuSettings) -> Row:
    """The matrix row for a memory share and a model size."""
    share = max(share_pct, 0.0)
    return next(r for r in matrix(settings) if r.minimum <= share < r.below and size in r.sizes)


def memory_grade(allocated_gb: float | None, settings: GpuSettings) -> str | None:
    """Source 004's table: 15-35 GB good, 10-15 GB acceptable, below 1 GB bad; `poor` between those,
    `high` above. None if the amount is unknown or no GPU is expected."""
    if allocated_gb is None or settings.expect == 0:
        return None
    if allocated_gb < settings.low_memory_gb:
        return "bad"
    if allocated_gb < settings.acceptable_memory_gb:
        return "poor"
    if allocated_gb < settings.good_memory_gb:
        return "acceptable"
    return "good" if allocated_gb <= settings.high_memory_gb else "high"


def described(size: str, name: str | None) -> str:
    """`large model (EfficientNet-B4)`, in source 002's format."""
    if size == UNKNOWN:
        return f"a model of unknown size ({_SET_NAME})"
    return f"{size} model ({name})" if name else f"{size} model"


@dataclass(frozen=True)
class MemoryReading:
    """One GPU's memory at one check."""

    gpu: str
    """Rank or GPU, as shown in messages."""

    used_gb: float
    total_gb: float
    source: str
    """`hook` (torch's allocated bytes), `printed` (a line from the miner), `nvml` (bytes of all
    processes on that GPU)."""

    busy_pct: float | None = None
    """The GPU's mean utilization since the last check; None if NVML does not report it."""

    @property
    def share_pct(self) -> float:
        return 100 * self.used_gb / self.total_gb


class GpuUse:
    """Judges each check of one launch against its history, and distinguishes a sudden drop from a
    gradual decline."""

    def __init__(self, settings: GpuSettings) -> None:
        self._settings = settings
        self._history: dict[str, deque[float]] = {}
        self._warned = OncePer(_WARN_EVERY_S)

    def check(
        self,
        readings: Sequence[MemoryReading],
        *,
        size: str,
        name: str | None,
        step: int | None,
        seconds: float,
    ) -> Iterator[Finding]:
        """Judge one check, `seconds` after the launch. A check without any reading is a finding
        too."""
        if not readings:
            yield make_finding(
                "gpu_usage",
                level="warning",
                used_gb=None,
                total_gb=None,
                share_pct=None,
                source=None,
                factor=None,
                verdict=f"no GPU memory reading from the hook, the miner's output or NVML within "
                f"{seconds:.0f} s of the launch: call guard.diagnose or print GPU memory",
            )
            return
        for reading in readings:
            yield from self._dropped(reading, step)
        # Judge the least used GPU: under FSDP all GPUs should be alike.
        lowest = min(readings, key=lambda r: r.share_pct)
        row = decide(lowest.share_pct, size, self._settings)
        if row.factor > 1 and self._good_amount(lowest):
            row = replace(_GOOD_AMOUNT, verdict=_GOOD_AMOUNT.verdict.format(good=lowest.used_gb))
        words = row.verdict.format(
            model=described(size, name), goal=f"{self._settings.optimal_pct:.0f}%+"
        )
        if row.factor > 1 and size == SMALL:
            words += " (1.5x-2x; it may not help a small model much)"
        trend = self.trend(lowest.gpu)
        verdict = f"GPU at {lowest.share_pct:.0f}% {words}."
        verdict += f" {trend}." if trend else ""
        verdict += self._utilization(lowest.busy_pct)
        # Repeating the advice every 150 s would bury other lines; every line still contains the
        # share.
        warns = row.level != "info" and self._warned.ask(seconds, row.verdict)
        yield make_finding(
            "gpu_usage",
            level=row.level if warns else None,
            used_gb=lowest.used_gb,
            total_gb=lowest.total_gb,
            share_pct=lowest.share_pct,
            verdict=verdict,
            gpu=lowest.gpu,
            source=lowest.source,
            factor=row.factor,
            model_size=size,
            step=step,
        )

    def _utilization(self, busy_pct: float | None) -> str:
        """Describe the mean utilization; if it is low, add source 000's conclusion that something
        blocks training."""
        if busy_pct is None:
            return ""
        words = f" Utilization {busy_pct:.0f}%"
        if busy_pct >= self._settings.idle_pct:
            return f"{words}."
        return (
            f"{words}, below {self._settings.idle_pct:.0f}%: monitoring or data loading may be "
            "blocking training; see `miner-guard costs` and the phases."
        )

    def _good_amount(self, reading: MemoryReading) -> bool:
        """Return whether the amount in use is good even though the share is low: source 004's
        healthy machine uses 28 of 80 GB at 95 % utilization."""
        busy = reading.busy_pct is not None and reading.busy_pct >= self._settings.busy_pct
        return busy and reading.used_gb >= self._settings.good_memory_gb

    def _dropped(self, reading: MemoryReading, step: int | None) -> Iterator[Finding]:
        history = self._history.setdefault(reading.gpu, deque(maxlen=HISTORY))
        if history and history[-1] - reading.share_pct >= self._settings.drop_pct:
            yield make_finding(
                "gpu_drop",
                from_pct=history[-1],
                to_pct=reading.share_pct,
                step=step,
                gpu=reading.gpu,
                detail="a sudden drop: did the code free a model or change the batch size?",
            )
            # Start a new history after the drop, so that the drop does not count as a decline too.
            history.clear()
        history.append(reading.share_pct)

    def trend(self, gpu: str) -> str:
        """Describe the history of one GPU; empty while it is too short to judge."""
        history = self._history.get(gpu, deque())
        if len(history) < 3:
            return ""
        first, last, low, high = history[0], history[-1], min(history), max(history)
        if high - low <= STABLE_POINTS:
            return f"Stable at {low:.0f}-{high:.0f}% over {len(history)} checks"
        if last < first - STABLE_POINTS:
            # Optimizer states and caches settle: source 002 calls 76 % to 72 % over ten epochs
            # normal.
            return (
                f"Gradual decline from {first:.0f}% to {last:.0f}% over {len(history)} "
                "checks, not a concern in itself"
            )
        if last > first + STABLE_POINTS:
            return f"Rising from {first:.0f}% to {last:.0f}% over {len(history)} checks"
        return f"Between {low:.0f}% and {high:.0f}% over {len(history)} checks"


_USED = re.compile(r"GPU Memory Used: (\d+(?:\.\d+)?) ?GB / (\d+(?:\.\d+)?) ?GB")
_EPOCH = re.compile(r"\bGPU=(\d+(?:\.\d+)?) ?GB \((\d+(?:\.\d+)?)%\)")
_STEP_LINE = re.compile(r"GPU Mem: (\d+(?:\.\d+)?)GB")
_MODEL = re.compile(r"^Model: (\S[^|]{0,60})$")
_EPOCH_NUMBER = re.compile(r"\b(?:Epoch|Inner Step:|Step) ?(\d+)")


@dataclass(frozen=True)
class Printed:
    """GPU memory figures from a line of the miner's output; None for a figure that the line
    lacks."""

    used_gb: float | None = None
    total_gb: float | None = None
    model: str | None = None
    step: int | None = None


def parse(line: str) -> Printed | None:
    """Parse a line in source 002's or 004's format; None for any other line."""
    number = _EPOCH_NUMBER.search(line)
    step = int(number.group(1)) if number else None
    if match := _USED.search(line):
        return Printed(float(match.group(1)), float(match.group(2)), step=step)
    if match := _EPOCH.search(line):
        used, share = float(match.group(1)), float(match.group(2))
        return Printed(used, 100 * used / share if share else None, step=step)
    if match := _STEP_LINE.search(line):
        return Printed(float(match.group(1)), step=step)
    if match := _MODEL.match(line):
        return Printed(model=match.group(1).strip())
    return None
