"""What several ranks show alike is one event that names them.

Ranks of one launch step, allocate and fail together, but their steps reach the guard one rank after
the other. So a monitor of all ranks collects what they show, and reports it at the tick, by which
every rank's steps have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from miner_guard.rank.layout import StepRecord

FindingT = TypeVar("FindingT")


@dataclass
class SharedFinding(Generic[FindingT]):
    """A finding of one or several ranks; `finding` and `step` are those of the first in time."""

    finding: FindingT
    step: StepRecord
    ranks: dict[int, StepRecord]
    """Each rank's step that showed it."""


class SharedFindings(Generic[FindingT]):
    """The findings of all ranks in one launch. Memory: the last 32."""

    def __init__(
        self, are_alike: Callable[[SharedFinding[FindingT], SharedFinding[FindingT]], bool]
    ) -> None:
        """`are_alike` compares findings of different ranks."""
        self._are_alike = are_alike
        self.pending: list[SharedFinding[FindingT]] = []
        self.told: deque[SharedFinding[FindingT]] = deque(maxlen=32)
        """What was reported last, so that another rank does not repeat it."""

    def add(self, rank: int, step: StepRecord, finding: FindingT) -> None:
        self.pending.append(SharedFinding(finding, step, {rank: step}))

    def take(self) -> list[SharedFinding[FindingT]]:
        """What is pending and new, the first in time first."""
        new: list[SharedFinding[FindingT]] = []
        for each in sorted(self.pending, key=lambda s: (s.step.end, s.step.total_steps, *s.ranks)):
            for other in (*new, *self.told):
                if not each.ranks.keys() & other.ranks.keys() and self._are_alike(other, each):
                    other.ranks |= each.ranks
                    break
            else:
                new.append(each)
        self.pending = []
        self.told.extend(new)
        return new
