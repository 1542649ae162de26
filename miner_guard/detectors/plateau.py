"""Detects a loss that has stopped falling: the model has converged if the loss fell before;
otherwise it is not learning."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator

from miner_guard.config import LossSettings
from miner_guard.detectors import advice
from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.trend import p_rising, p_rising_trimmed
from miner_guard.detectors.window import MAD_TO_SIGMA

_BLOCKS = 32
_MIN_DELTA = 0.01
"""Minimum relative drop of the smoothed best for the loss to count as improved."""

_GAIN_SIGMAS = 2.0
"""The gain must also be this multiple of the blocks' noise: the lowest of many noisy blocks is low
by chance."""

_LEARNED = 0.10
"""If the loss has fallen by this share of its first level, the model has learned, and a later
plateau is convergence."""

_CHANCE = (7.0, 13.0)
"""An untrained language model's loss, in nats: ln(vocabulary size), for 1,100 to 440,000 tokens."""

_NEAR_CHANCE = 0.12
"""Learning only the token frequencies lowers a language model's loss by this fraction of its
initial value."""


def near_chance(begin: float, best: float) -> bool:
    """Return whether a loss that started at `begin` and has reached `best` is still that of an
    untrained language model."""
    return _CHANCE[0] <= begin <= _CHANCE[1] and begin - best < _NEAR_CHANCE * begin


class Plateau:
    """Reports a loss that has reached no new low for `plateau_steps`: as convergence if it fell
    earlier, otherwise as a model that is not learning."""

    def __init__(self, settings: LossSettings) -> None:
        self._steps = settings.plateau_steps
        self._size = max(1, settings.plateau_steps // _BLOCKS)
        """Minimum number of steps in a block: a trainer may log only every 50th step."""

        self._sum = 0.0
        self._count = 0
        self._ended: int | None = None
        """The last step of the latest block."""

        self._blocks: deque[float] = deque(maxlen=_BLOCKS)
        self._first: float | None = None
        self._best = math.inf
        self._best_step = 0
        self._reported = False

    def observe(self, step: int, loss: float, lr: float | None) -> Iterator[Anomaly]:
        """Judge one loss. Reports each plateau once."""
        if self._ended is None or step <= self._ended:
            # The first step, or the first after training resumed from an earlier checkpoint.
            self._ended = step - 1
            self._best_step = min(self._best_step, step)
        self._sum += loss
        self._count += 1
        if step - self._ended < self._size:
            return
        level = self._sum / self._count
        self._sum, self._count, self._ended = 0.0, 0, step
        self._blocks.append(level)
        self._first = level if self._first is None else self._first
        min_gain = max(_MIN_DELTA * abs(self._best), _GAIN_SIGMAS * self._noise())
        if self._best == math.inf or level < self._best - min_gain:
            self._best, self._best_step, self._reported = level, step, False
            return
        if self._reported or step - self._best_step < self._steps or len(self._blocks) < _BLOCKS:
            return
        if self._falls(list(self._blocks)):
            return
        self._reported = True
        yield self._anomaly(step, level, lr)

    def _noise(self) -> float:
        """Standard deviation of a block; a second difference has six times the variance."""
        kept = list(self._blocks)
        bends = [abs(a - 2 * b + c) for a, b, c in zip(kept, kept[1:], kept[2:], strict=False)]
        return MAD_TO_SIGMA * statistics.median(bends) / math.sqrt(6) if len(bends) > 4 else 0.0

    @staticmethod
    def _falls(blocks: list[float]) -> bool:
        """Return whether the blocks fall by more than chance explains, and by enough to matter."""
        third = len(blocks) // 3
        fall = statistics.median(blocks[:third]) - statistics.median(blocks[-third:])
        surely = 1 - p_rising(blocks) > 0.9 or 1 - p_rising_trimmed(blocks) > 0.9
        return surely and fall > _MIN_DELTA * abs(statistics.median(blocks))

    def _anomaly(self, step: int, level: float, lr: float | None) -> Anomaly:
        assert self._first is not None
        without_low = step - self._best_step
        fallen = (self._first - self._best) / abs(self._first) if self._first else 0.0
        seen = {"first": self._first, "best": self._best, "level": level, "window": without_low}
        if fallen >= _LEARNED:
            text = (
                f"converged: loss {level:.4g}, {fallen:.0%} below its first level, no new low for "
                f"{without_low} steps"
            )
            return Anomaly(
                "plateau_high",
                step,
                "info",
                text,
                (),
                "healthy convergence, or time for a lower LR",
                seen,
            )
        cause, fixes = advice.for_plateau(lr)
        text = (
            f"loss {level:.4g}, {fallen:.1%} below its first level, no new low for "
            f"{without_low} steps"
        )
        severity = "warning" if near_chance(self._first, self._best) else "info"
        return Anomaly("plateau_high", step, severity, text, fixes, cause, seen)
