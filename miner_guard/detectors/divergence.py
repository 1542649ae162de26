"""Detects a loss that climbs away from its best level and stays there, or explodes within a few
steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator

from miner_guard.config import LossSettings
from miner_guard.detectors import advice
from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.window import MAD_TO_SIGMA, SortedWindow

SEEN_BEFORE = 1.5
"""A jump must be this many times as high as any earlier jump from which the loss recovered, because
every epoch may cause a similar one."""


class Divergence:
    """Detects a loss that climbs away from its best level and does not come back.

    Levels are medians of blocks. The last four must all exceed the best one: by 10 %, by six sigmas
    of the noise (measured on second differences, which a trend does not affect), and by 1.5 times
    any rise that the run has recovered from (at a new epoch, after a warm restart, or with
    unshuffled data). The last level must be close to the highest one.
    """

    _GAP = 0.10
    _GAP_SIGMAS = 6.0
    _LASTING = 4
    _NEAR_TOP = 0.9
    _KEPT = 32

    def __init__(self, settings: LossSettings) -> None:
        self._size = max(8, settings.divergence_points // 2)
        self._block: list[float] = []
        self._levels: deque[float] = deque(maxlen=self._LASTING)
        self._bends = SortedWindow(self._KEPT)
        self._best: tuple[float, int] | None = None
        self._rise = self._recovered = 0.0
        self._reported = False
        self.came_back = False
        """True if the loss has recovered since the last finding."""

    def reported(self) -> None:
        """Note that another rule has already reported the current climb."""
        self._reported = True
        # Values from before the climb would make it look as if the loss had recovered.
        self._block.clear()

    def observe(self, step: int, loss: float, lr: float | None) -> Iterator[Anomaly]:
        """Judge one loss. Reports each climb once."""
        self._block.append(loss)
        if len(self._block) < self._size:
            return
        level = statistics.median(self._block)
        self._block.clear()
        self._levels.append(level)
        if len(self._levels) >= 3:
            first, middle, last = list(self._levels)[-3:]
            self._bends.add(abs(first - 2 * middle + last))
        if self._best is None or level < self._best[0]:
            self._came_back(0.0, level)
            self._best = (level, step)
            return
        best, best_step = self._best
        if level - best < self._rise / 2:
            self._came_back(level - best, best)
        self._rise = max(self._rise, level - best)
        if self._reported or not self._climbs(best):
            return
        self._reported, self.came_back = True, False
        cause, fixes = advice.for_divergence(lr, best_step)
        window = self._size * self._LASTING
        yield Anomaly(
            "divergence",
            step,
            "warning",
            f"loss rose from {best:.4g} (best level, step {best_step}) to {level:.4g} and has not "
            f"come back for {window} steps",
            fixes,
            cause,
            {"best": best, "best_step": best_step, "level": level, "window": window},
        )

    def _came_back(self, rise: float, best: float) -> None:
        self._recovered = max(self._recovered, self._rise)
        self._rise, self.came_back = rise, True
        # Until the loss is halfway back, this is still the climb that was reported.
        self._reported = self._reported and rise > self._GAP * abs(best)

    def _climbs(self, best: float) -> bool:
        if len(self._levels) < self._LASTING:
            return False
        noise = MAD_TO_SIGMA * self._bends.median / math.sqrt(6)
        gap = max(self._GAP * abs(best), self._GAP_SIGMAS * noise, SEEN_BEFORE * self._recovered)
        lasts = min(self._levels) - best > gap
        return lasts and self._levels[-1] - best >= self._NEAR_TOP * self._rise


def explosion(step: int, loss: float, median: float, *, steps: int, lr: float | None) -> Anomaly:
    """Return the anomaly for a loss that has stayed at a multiple of its usual level."""
    cause, fixes = advice.for_divergence(lr, step - steps)
    return Anomaly(
        "divergence",
        step,
        "critical",
        f"loss {loss:.4g} has been more than twice its median of {median:.4g} for {steps} steps",
        fixes,
        cause,
        {"loss": loss, "median": median, "steps": steps},
    )
