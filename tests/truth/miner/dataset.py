"""Replaces data/dataset.py: synthetic batches. The miner fetches once for each upload; each fetch
records the end of the upload before it, and after the last one the miner stops."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from miner_guard.validators import states
from tests.truth.miner import neuron, world

FIRST_STEP = 60
"""The inner step at the start: above the operator's minimum of 50."""


class _OnCpu(torch.Tensor):
    """Tokens that stay on the CPU when the miner moves them to its rank's GPU."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self.as_subclass(torch.Tensor)


class _Batches:
    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(neuron.miner.local_rank)
        self.buffer = [
            torch.randint(0, 256, (2, 33), generator=generator).as_subclass(_OnCpu)
            for _ in range(steps * world.MICRO_BATCHES)
        ]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter([(tokens, tokens) for tokens in self.buffer])


class _Uploads:
    """Counts the miner's uploads, and waits for the last one before the next begins."""

    def __init__(self, miner: Any) -> None:
        self._miner = miner
        self._left: int | None = None
        self._future: Any = None

    def next(self) -> bool:
        """Whether one more upload follows; if not, the miner stops."""
        if self._left is None:
            self._start()
            self._left = world.current().uploads
        else:
            self._record()
        if not self._left:
            # Until November 2025, the inner loop ended through an event.
            self._miner.should_exit = True
            self._miner.stop_event.set()
            return False
        self._left -= 1
        self._future = getattr(self._miner, "current_upload_future", None)
        return True

    def _start(self) -> None:
        """Wait for the upload at startup, if any, and set the miner's initial step counters."""
        miner = self._miner
        future = getattr(miner, "current_upload_future", None)
        if future is not None:
            future.exception()
        miner.local_progress.epoch = miner.global_progress.epoch = states.GOOD.network_epoch
        miner.local_progress.inner_step = FIRST_STEP

    def _record(self) -> None:
        miner, result = self._miner, "not started"
        future = miner.current_upload_future
        if future is not None and future is not self._future:
            error = future.exception()
            result = repr(future.result()) if error is None else repr(error)
        if not miner.master:
            return
        feedback = getattr(miner, "error_feedback", {})
        tensors = [*miner.model.parameters(), *(feedback[name] for name in sorted(feedback))]
        whole = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        own = [t.detach().numpy().tobytes() for t in [*whole, torch.get_rng_state()]]
        digest = hashlib.sha256(b"".join(own)).hexdigest()
        world.current().log("uploads", {"result": result, "state": digest})


@functools.cache
def _uploads() -> _Uploads:
    return _Uploads(neuron.miner)


class DatasetLoader:
    """The pages of a data set on the Hub."""

    @staticmethod
    async def next_pages(**_: Any) -> list[int]:
        return [0, 1, 2]

    @staticmethod
    async def create(**_: Any) -> _Batches:
        return _Batches(world.UPLOAD_STEPS if _uploads().next() else 0)
