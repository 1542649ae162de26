"""Detects ranks that compute on the CPU but should not. Gives a verdict and its evidence for each
rank.

- certain: the model's compute device is the CPU, or the loss comes from the CPU and the model was
  never seen on a GPU, while hardly any GPU memory is allocated. (A loss on the CPU proves nothing
  by itself: a miner may copy it there to report it. Neither does a model on the CPU while GPU
  memory is in use: the miner has since moved it, or offloads it.)
- suspected: hardly any GPU memory is allocated, or NVML shows that no GPU is used, and steps are
  slow (source 004: < 1 GB and > 60 s); or the GPU memory is unknown, steps take several times as
  long as before and stay that slow, and no phase explains it.
- cleared: was suspected or certain before, and the evidence is gone.

Reports nothing where the settings ask for the CPU (`[gpu] expect = 0`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from miner_guard.config import GpuSettings, StepSettings
from miner_guard.detectors.step_time import scheduled_seconds
from miner_guard.detectors.window import SortedWindow

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

_KEPT = 64
"""Consecutive slow steps kept: 64 steps of 0.2 s add up to more than five seconds."""

_EXPLAINING = 0.5
"""A waiting phase must account for this share of the excess to explain a slow step."""

_WAITING = ("data", "collective", "monitor")


@dataclass(frozen=True)
class Observation:
    """Evidence from a single step on one rank."""

    seconds: float
    phases: Mapping[str, float]
    allocated_gb: float | None
    loss_on_cpu: bool


@dataclass(frozen=True)
class FallbackVerdict:
    """The verdict on one rank, with its reason."""

    verdict: str
    evidence: tuple[str, ...]


class RankWatch:
    """Judges one rank, step by step."""

    def __init__(self, gpu: GpuSettings, steps: StepSettings) -> None:
        self._gpu = gpu
        self._steps = steps
        self._baseline = SortedWindow(64)
        self._recent: deque[Observation] = deque(maxlen=_LASTING)
        self._slowed: list[float] = []
        self._seen = 0
        self.model_device: str | None = None
        """Compute device that the rank's own diagnosis reported."""

        self.offloaded = False
        self.unused: str | None = None
        """NVML's evidence that no GPU is in use, as text."""

        self.verdict: FallbackVerdict | None = None

    def observe(self, seen: Observation) -> FallbackVerdict | None:
        """Judge one step. Returns a verdict when it is new or has changed."""
        self._seen += 1
        self._recent.append(seen)
        if self._seen > 1:
            # The first step of a launch compiles and fills caches.
            self._compare(seen)
        return self._changed()

    def diagnosed(self, model_device: str | None, offloaded: bool) -> None:
        """Record the result of the rank's own diagnosis."""
        self.model_device = model_device
        self.offloaded = offloaded

    def _compare(self, seen: Observation) -> None:
        core = seen.seconds - scheduled_seconds(seen.phases)
        base = self._baseline
        if len(base) < _BASELINE:
            base.add(core)
            return
        excess = core - base.median
        waited = sum(seen.phases.get(name, 0.0) for name in _WAITING)
        slowed = (
            core > _EACH_FACTOR * base.median
            and excess > _MIN_EXCESS_S
            and waited < _EXPLAINING * excess
        )
        self._slowed = [*self._slowed, core][-_KEPT:] if slowed else []
        if core <= _EACH_FACTOR * base.median:
            base.add(core)

    def _changed(self) -> FallbackVerdict | None:
        judged = self._judge()
        before = self.verdict
        if judged is None:
            if before is None or before.verdict == CLEARED or len(self._recent) < _LASTING:
                return None
            last = self._recent[-1]
            memory = (
                "memory unknown"
                if last.allocated_gb is None
                else f"{last.allocated_gb:.2f} GB allocated"
            )
            self.verdict = FallbackVerdict(CLEARED, (f"{memory}, step {last.seconds:.1f}s",))
            return self.verdict
        if before is not None and before.verdict == judged.verdict:
            return None
        self.verdict = judged
        return judged

    def _judge(self) -> FallbackVerdict | None:
        if self._gpu.expect == 0 or not self._recent:
            return None
        last = self._recent[-1]
        low = last.allocated_gb is not None and last.allocated_gb < self._gpu.low_memory_gb
        memory = (
            [f"{last.allocated_gb:.2f} GB allocated on the GPU"]
            if last.allocated_gb is not None
            else []
        )
        certain = self._certain(last, low)
        if certain:
            return FallbackVerdict(CERTAIN, (*certain, *memory, f"step {last.seconds:.1f}s"))
        slow = [
            s for s in self._recent if s.seconds - scheduled_seconds(s.phases) > self._steps.slow_s
        ]
        idle = [self.unused] if self.unused is not None and not self._on_gpu(last) else []
        if (low or idle) and len(slow) >= 2:
            how_slow = f"step {last.seconds:.1f}s (slow above {self._steps.slow_s:g}s)"
            return FallbackVerdict(SUSPECTED, (*memory, *idle, how_slow))
        if self._lastingly_slowed() and not self._on_gpu(last):
            times = last.seconds / self._baseline.median
            return FallbackVerdict(
                SUSPECTED,
                (
                    *(memory or ["GPU memory use is unknown"]),
                    f"steps are taking {times:.1f} times as long as before "
                    f"({self._baseline.median:.2f}s before, {last.seconds:.2f}s now)",
                    "no waiting phase accounts for it",
                ),
            )
        return None

    def _lastingly_slowed(self) -> bool:
        if len(self._slowed) < _LASTING or sum(self._slowed) < _MIN_SLOWED_S:
            return False
        return statistics.median(self._slowed[-_LASTING:]) > _FACTOR * self._baseline.median

    def _certain(self, last: Observation, low: bool) -> list[str]:
        evidence = []
        expected = isinstance(self._gpu.expect, int) and self._gpu.expect > 0
        if (
            self.model_device == "cpu"
            and not self.offloaded
            and (low or (expected and last.allocated_gb is None))
        ):
            evidence.append("the model's compute device is cpu")
        if (
            last.loss_on_cpu
            and self.model_device in (None, "cpu")
            and (low or last.allocated_gb is None)
        ):
            evidence.append("the loss is computed on the cpu")
        return evidence

    def _on_gpu(self, last: Observation) -> bool:
        return last.allocated_gb is not None and last.allocated_gb >= self._gpu.low_memory_gb
