"""A model that computes on the CPU although it has a GPU: the evidence, rank by rank."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from miner_guard.config import GpuSettings, StepSettings
from miner_guard.rank.layout import FLAG_FIRST, FLAG_LOSS_ON_CPU, StepRecord
from miner_guard.record.words import gb
from miner_guard.watch.step_times import scheduled_seconds

CERTAIN, SUSPECTED, CLEARED = "certain", "suspected", "cleared"

_RECENT = 5
"""Two of this many latest steps must be slow for a suspicion, with low memory or idle GPUs: a model
does not move to the CPU during a launch, so slower steps alone are no evidence."""

_WINDOW = 32
"""Steps that are kept of each rank."""


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
        self.steps: deque[StepRecord] = deque(maxlen=_WINDOW)
        """The latest steps after the first, which compiles and fills caches."""

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
        before = CLEARED if self.verdict is None else self.verdict.verdict
        judged = self._judge(step)
        if judged is None and before != CLEARED and len(self.steps) >= _RECENT:
            memory = gb(step.allocated_bytes)
            words = "memory unknown" if memory is None else f"{memory:.2f} GB allocated"
            judged = FallbackVerdict(CLEARED, (f"{words}, step {step.seconds:.1f}s",))
        if judged is not None and judged.verdict != before:
            self.verdict = judged

    def _judge(self, step: StepRecord) -> FallbackVerdict | None:
        if self._gpu.expect == 0:
            return None
        memory = gb(step.allocated_bytes)
        low = memory is not None and memory < self._gpu.low_memory_gb
        certain = self._certain(step, low=low)
        suspicious = self.unused is not None if memory is None else low
        if not certain and (self.no_gpu or not suspicious or not self._is_slow()):
            return None
        holds = [] if memory is None else [f"{memory:.2f} GB allocated on the GPU"]
        if certain:
            return FallbackVerdict(CERTAIN, (*certain, *holds, f"step {step.seconds:.1f}s"))
        idle = [] if self.unused is None else [self.unused]
        how_slow = f"step {step.seconds:.1f}s (slow above {self._settings.slow_s:g}s)"
        return FallbackVerdict(SUSPECTED, (*holds, *idle, how_slow))

    def _is_slow(self) -> bool:
        recent = itertools.islice(reversed(self.steps), _RECENT)
        seconds = (step.seconds - scheduled_seconds(step.phases) for step in recent)
        return sum(each > self._settings.slow_s for each in seconds) >= 2

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
