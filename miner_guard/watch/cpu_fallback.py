"""A model that computes on the CPU although it has a GPU: the evidence, rank by rank."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass

from miner_guard.config import GpuSettings, StepSettings
from miner_guard.rank.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU, StepRecord
from miner_guard.record.words import gb
from miner_guard.watch.series import SortedWindow
from miner_guard.watch.step_times import scheduled_seconds

CERTAIN, SUSPECTED, CLEARED = "certain", "suspected", "cleared"

_LASTING = 5
"""Consecutive steps for which evidence must hold before the verdict changes, in either
direction."""

_BASELINE = 5
"""Minimum number of steps in the baseline, which excludes steps slower than twice its median."""

_FACTOR = 4.0
_EACH_FACTOR = 2.0
"""A CPU is 10-20 times slower than a GPU (source 004: 240 s versus 15 s), while a busy host makes
one step in hundreds take four times as long. So the median of the latest steps must exceed
`_FACTOR` times the baseline, but each individual step only `_EACH_FACTOR` times: a single faster
step does not prove a recovery."""

_MIN_EXCESS_S = 0.25
_MIN_SLOWED_S = 5.0
"""Seconds that the slow steps must add up to, because short steps are easily delayed."""

_WINDOW = 64
"""Steps that are kept of each rank: 64 steps of 0.2 s add up to more than five seconds."""

_EXPLAINING = 0.5
"""A waiting phase must account for this share of the excess to explain a slow step."""

_WAITING = ("data", "collective", "monitor")


@dataclass(frozen=True)
class FallbackVerdict:
    """Whether one rank computes on the CPU, with the reason."""

    verdict: str
    evidence: tuple[str, ...]


class RankWatch:
    """One rank's recent steps, and whether its model is on the CPU."""

    def __init__(self, gpu: GpuSettings, steps: StepSettings) -> None:
        self._gpu = gpu
        self._settings = steps
        self._baseline = SortedWindow(_WINDOW)
        self.steps: deque[StepRecord] = deque(maxlen=_WINDOW)
        """The latest steps after the first, which compiles and fills caches."""

        self._slowed = 0
        """How many of the latest steps, without interruption, were slower than the baseline."""

        self.new = 0
        """Steps since the ranks were last compared."""

        self.model_device: str | None = None
        """Compute device that the rank's own diagnosis reported."""

        self.offloaded = False
        self.no_gpu = False
        """Whether training without a GPU is right; see `without_gpu`."""

        self.unused: str | None = None
        """NVML's evidence that no GPU is in use, as text."""

        self.verdict: FallbackVerdict | None = None

    def observe(self, step: StepRecord) -> None:
        """Judge one step."""
        if not step.flags & FLAG_FIRST:
            self.steps.append(step)
            self.new += 1
            self._compare(step)
        judged = self._judge(step)
        if judged is not None:
            if self.verdict is None or self.verdict.verdict != judged.verdict:
                self.verdict = judged
        elif self.verdict is not None and len(self.steps) >= _LASTING:
            memory = gb(step.allocated_bytes)
            words = "memory unknown" if memory is None else f"{memory:.2f} GB allocated"
            if self.verdict.verdict != CLEARED:
                self.verdict = FallbackVerdict(CLEARED, (f"{words}, step {step.seconds:.1f}s",))

    def _compare(self, step: StepRecord) -> None:
        core_s, base = _core(step), self._baseline
        if len(base) < _BASELINE:
            base.add(core_s)
            return
        excess = core_s - base.median
        waited = sum(step.phases.get(name, 0.0) for name in _WAITING)
        beyond = core_s > _EACH_FACTOR * base.median
        slowed = beyond and excess > _MIN_EXCESS_S and waited < _EXPLAINING * excess
        self._slowed = min(self._slowed + 1, _WINDOW) if slowed else 0
        if not beyond:
            base.add(core_s)

    def _judge(self, step: StepRecord) -> FallbackVerdict | None:
        if self._gpu.expect == 0:
            return None
        memory = gb(step.allocated_bytes)
        low = memory is not None and memory < self._gpu.low_memory_gb
        holds = [] if memory is None else [f"{memory:.2f} GB allocated on the GPU"]
        certain = self._certain(step, low=low)
        if certain:
            return FallbackVerdict(CERTAIN, (*certain, *holds, f"step {step.seconds:.1f}s"))
        if self.no_gpu or (memory is not None and not low):
            return None
        limit_s = self._settings.slow_s
        slow = [s for s in itertools.islice(reversed(self.steps), _LASTING) if _core(s) > limit_s]
        idle = [] if self.unused is None else [self.unused]
        if (low or idle) and len(slow) >= 2:
            how_slow = f"step {step.seconds:.1f}s (slow above {limit_s:g}s)"
            return FallbackVerdict(SUSPECTED, (*holds, *idle, how_slow))
        if not self._lastingly_slowed():
            return None
        usual_s = self._baseline.median
        return FallbackVerdict(
            SUSPECTED,
            (
                *(holds or ["GPU memory use is unknown"]),
                f"steps are taking {step.seconds / usual_s:.1f} times as long as before "
                f"({usual_s:.2f}s before, {step.seconds:.2f}s now)",
                "no waiting phase accounts for it",
            ),
        )

    def _lastingly_slowed(self) -> bool:
        slowed = [_core(s) for s in itertools.islice(reversed(self.steps), self._slowed)]
        return (
            len(slowed) >= _LASTING
            and sum(slowed) >= _MIN_SLOWED_S
            and statistics.median(slowed[:_LASTING]) > _FACTOR * self._baseline.median
        )

    def _certain(self, step: StepRecord, *, low: bool) -> list[str]:
        evidence = []
        unknown = step.allocated_bytes is None
        expected = isinstance(self._gpu.expect, int) and self._gpu.expect > 0
        on_cpu = self.model_device == "cpu" and not self.offloaded
        if on_cpu and (low or (expected and unknown)):
            evidence.append("the model's compute device is cpu")
        loss_on_cpu = step.flags & FLAG_LOSS_ON_CPU and self.model_device in (None, "cpu")
        if loss_on_cpu and (low or unknown):
            evidence.append("the loss is computed on the cpu")
        return evidence


def _core(step: StepRecord) -> float:
    """Seconds that a step spent on training."""
    return step.seconds - scheduled_seconds(step.phases)
