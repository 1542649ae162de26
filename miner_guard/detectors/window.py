"""A sliding window that is kept sorted: median, MAD and quantiles of the recent past in bounded
memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

MAD_TO_SIGMA = 1.4826
"""MAD times this estimates the standard deviation of normal noise (Rousseeuw and Croux, 1993)."""


class SortedWindow:
    """The last `size` finite values. Adding costs O(size) moves of memory, reading the median
    O(1)."""

    __slots__ = ("_order", "_sorted", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Take `value` in, and the oldest out where the window is full."""
        if len(self._order) == self.size:
            self.drop_oldest()
        self._order.append(value)
        insort(self._sorted, value)

    def drop_oldest(self) -> None:
        """Take the oldest value out. Raises IndexError where the window is empty."""
        del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
        self._sorted.clear()

    @property
    def median(self) -> float:
        """Raises IndexError where the window is empty."""
        return self.quantile(0.5)

    def quantile(self, share: float) -> float:
        """Linear interpolation between the two nearest values (numpy's default). Raises IndexError
        where empty."""
        place = share * (len(self._sorted) - 1)
        low = int(place)
        value = self._sorted[low]
        if place > low:
            value += (self._sorted[low + 1] - value) * (place - low)
        return value

    def mad(self) -> float:
        """Median absolute deviation from the median, without the factor. Raises IndexError where
        empty."""
        values = self._sorted
        middle = self.median
        count = len(values)
        # The values left and right of the median are two sorted lists of distances: merge them
        # half-way.
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
        """median + max(factor · 1.4826 · MAD, min_excess_ratio · |median|). Raises IndexError where
        empty."""
        middle = self.median
        return middle + max(factor * MAD_TO_SIGMA * self.mad(), min_excess_ratio * abs(middle))
