"""Finds leaks and sudden drops in GPU memory across steps. Takes *allocated* memory at one fixed
point in the step.

Reserved memory grows legitimately. A single legitimate allocation of a GiB would mislead
regressions and bands, so the leak rule compares the minima of 8 blocks of 50 steps: at least 6 of
the 7 block-to-block changes must be rises, and the total rise must exceed 0.5 % and an absolute
floor.
"""

from __future__ import annotations

import itertools
from collections import deque

from miner_guard.config import LossSettings
from miner_guard.detectors import advice
from miner_guard.detectors.advice import Anomaly
from miner_guard.detectors.window import SortedWindow

_BLOCKS = 8
_BLOCK_STEPS = 50
_RISING = 6
_MIN_GROWTH = 0.005
_DROP_SHARE = 0.5
_DROP_STEPS = 3


class MemoryWatch:
    """Judges one rank's allocated GPU memory, in GiB."""

    def __init__(self, settings: LossSettings) -> None:
        self._floor_gb = settings.leak_floor_gb
        self._minima: deque[float] = deque(maxlen=_BLOCKS)
        self._lowest: float | None = None
        self._in_block = 0
        self._recent = SortedWindow(32)
        self._low_in_row = 0

    def observe(self, step: int, allocated_gb: float) -> Anomaly | None:
        """Judge one step's memory use."""
        return self._drop(step, allocated_gb) or self._leak(step, allocated_gb)

    def _leak(self, step: int, value: float) -> Anomaly | None:
        self._lowest = value if self._lowest is None else min(self._lowest, value)
        self._in_block += 1
        if self._in_block < _BLOCK_STEPS:
            return None
        self._minima.append(self._lowest)
        self._lowest, self._in_block = None, 0
        minima = list(self._minima)
        if len(minima) < _BLOCKS:
            return None
        growth = minima[-1] - minima[0]
        rising = sum(later > earlier for earlier, later in itertools.pairwise(minima))
        if rising < _RISING or growth <= max(self._floor_gb, _MIN_GROWTH * minima[0]):
            return None
        self._minima.clear()
        cause, fixes = advice.for_leak()
        per_step = growth / (_BLOCK_STEPS * (_BLOCKS - 1))
        return Anomaly(
            "memory_leak",
            step,
            "warning",
            f"allocated memory grew from {minima[0]:.2f} to {minima[-1]:.2f} GB over "
            f"{_BLOCKS * _BLOCK_STEPS} steps, "
            f"{1024 * per_step:.1f} MB per step, {rising} of {_BLOCKS - 1} blocks rising",
            fixes,
            cause,
            {"from_gb": minima[0], "to_gb": minima[-1], "gb_per_step": per_step},
        )

    def _drop(self, step: int, value: float) -> Anomaly | None:
        window = self._recent
        usual = window.median if len(window) >= 8 else None
        if usual is None or value > (1 - _DROP_SHARE) * usual or usual - value < 0.1:
            self._low_in_row = 0
            window.add(value)
            return None
        self._low_in_row += 1
        if self._low_in_row == window.size // 2:
            window.clear()
            window.add(value)
        if self._low_in_row != _DROP_STEPS:
            return None
        cause, fixes = advice.for_drop()
        return Anomaly(
            "memory_drop",
            step,
            "warning",
            f"allocated memory fell from {usual:.2f} to {value:.2f} GB ({value / usual:.0%}) and "
            f"stayed there for {_DROP_STEPS} steps",
            fixes,
            cause,
            {"from_gb": usual, "to_gb": value},
        )
