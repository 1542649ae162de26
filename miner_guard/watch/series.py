"""Running statistics over the last values of a series."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

MAD_TO_SIGMA = 1.4826
"""Factor that turns a MAD into an estimate of the standard deviation of normal noise
(Rousseeuw and Croux, 1993)."""


class SortedWindow:
    """The last `size` finite values. Adding costs O(size) memory moves, reading the median O(1)."""

    __slots__ = ("_order", "_sorted", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        if len(self._order) == self.size:
            self.drop_oldest()
        self._order.append(value)
        insort(self._sorted, value)

    def drop_oldest(self) -> None:
        """Drop the oldest value. Raises IndexError if the window is empty."""
        del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def clear(self) -> None:
        self._order.clear()
        self._sorted.clear()

    @property
    def median(self) -> float:
        """The median. Raises IndexError if the window is empty."""
        return self.quantile(0.5)

    def quantile(self, share: float) -> float:
        """Return a quantile, interpolated linearly between the two nearest values (numpy's
        default). Raises IndexError if empty."""
        place = share * (len(self._sorted) - 1)
        low = int(place)
        value = self._sorted[low]
        if place > low:
            value += (self._sorted[low + 1] - value) * (place - low)
        return value

    def mad(self) -> float:
        """Median absolute deviation from the median, without the factor. Raises IndexError if
        empty."""
        values = self._sorted
        middle = self.median
        count = len(values)
        # The distances left and right of the median form two sorted lists: merge them halfway.
        right = bisect_left(values, middle)
        left = right - 1
        distance = earlier = 0.0
        for _ in range(count // 2 + 1):
            earlier = distance
            if left >= 0 and (right >= count or middle - values[left] <= values[right] - middle):
                distance = middle - values[left]
                left -= 1
            else:
                distance = values[right] - middle
                right += 1
        return distance if count % 2 else (earlier + distance) / 2

    def robust_limit(self, factor: float, min_excess_ratio: float) -> float:
        """median + max(factor · 1.4826 · MAD, min_excess_ratio · |median|). Raises IndexError if
        empty."""
        middle = self.median
        return middle + max(factor * MAD_TO_SIGMA * self.mad(), min_excess_ratio * abs(middle))


def centred(values: Sequence[float], width: int) -> list[float]:
    """Return the moving mean over `width` values around each; an even window extends one value
    further to the right."""
    left, right = (width - 1) // 2, width // 2 + 1
    parts = (values[max(0, n - left) : n + right] for n in range(len(values)))
    return [math.fsum(part) / len(part) for part in parts]


def second_difference_sigma(values: Collection[float]) -> float:
    """Standard deviation of a value about a trend: a second difference has six times its
    variance."""
    series = list(values)
    bends = [abs(a - 2 * b + c) for a, b, c in zip(series, series[1:], series[2:], strict=False)]
    return MAD_TO_SIGMA * median(bends) / math.sqrt(6) if bends else 0.0


def kendall(values: Sequence[float]) -> float:
    """Kendall's tau against the order of the values. A long series is thinned to at most 400 evenly
    spaced values."""
    sample = list(values)[:: max(1, len(values) // 200)]
    pairs = len(sample) * (len(sample) - 1) // 2
    signs = sum((b > a) - (b < a) for n, a in enumerate(sample) for b in sample[n + 1 :])
    return signs / pairs if pairs else 0.0
