"""Replaces data/dataset.py: synthetic batches, and the plan's next round at each fetch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from tests.truth.miner import neuron, plan


class _OnCpu(torch.Tensor):
    """Tokens that stay on the CPU when the miner moves them to its rank's GPU."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self.as_subclass(torch.Tensor)


class _Batches:
    def __init__(self, now: plan.Round | None, rounds: plan.Rounds) -> None:
        steps = 0 if now is None else plan.read().upload_steps
        generator = torch.Generator().manual_seed(neuron.miner.local_rank)
        self.buffer = [
            torch.randint(0, 256, (2, 33), generator=generator).as_subclass(_OnCpu)
            for _ in range(steps * plan.MICRO_BATCHES)
        ]
        self._now, self._rounds = now, rounds

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if self._now is not None:
            self._rounds.break_(self._now)
        return iter([(tokens, tokens) for tokens in self.buffer])


@functools.cache
def _rounds() -> plan.Rounds:
    return plan.Rounds(neuron.miner)


class DatasetLoader:
    """The pages of a data set on the Hub."""

    @staticmethod
    async def next_pages(**_: Any) -> list[int]:
        return [0, 1, 2]

    @staticmethod
    async def create(**_: Any) -> _Batches:
        return _Batches(_rounds().next(), _rounds())
