"""The hook in a real training loop: guard on against guard off, in alternating blocks within one
process."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from miner_guard.rank.environment import find
from miner_guard.rank.guard import Guard
from tests.benchmarks.frame import Row
from tests.support.listener import listening

TITLE = "The hook in the demo's own training loop"
BLOCKS = 24
STEPS = 6


def run() -> list[Row]:
    """Step time with and without the guard, and the time inside `guard.step()` measured in place
    with cold caches."""
    with tempfile.TemporaryDirectory() as folder, listening(Path(folder, "guard.sock")):
        return _rows(Guard(find({"RANK": "1", "WORLD_SIZE": "1"}, folder)))


def _rows(guard: Guard) -> list[Row]:
    train = _loop()
    train(_NoGuard(), STEPS)
    off, on, inside = [], [], []
    for _ in range(BLOCKS // 2):
        off.append(train(_NoGuard(), STEPS)[0])
        seconds, hook = train(guard, STEPS)
        on.append(seconds)
        inside.append(hook)
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    spread = (
        f"pairs from {min(ratios):.3f} to {max(ratios):.3f}: noise is larger than the difference"
    )
    step_s = statistics.median(on)
    return [
        Row("a step with the guard / without", statistics.median(ratios), "×", note=spread),
        Row("step time", step_s * 1e3, "ms"),
        Row("guard.step() and 4 phases, in place", statistics.median(inside) * 1e6, "µs per step"),
        Row("the same as a share of a 1 s step", statistics.median(inside) * 100, "%", "< 0.1 %"),
    ]


def _loop() -> Any:
    import torch

    from miner_guard.demo.corpus import Corpus, standard_library
    from miner_guard.demo.model import ByteGPT, Shape

    shape = Shape()
    torch.manual_seed(38)
    model, corpus = ByteGPT(shape), Corpus(standard_library(), 38, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train(guard: Any, steps: int) -> tuple[float, float]:
        """Median seconds of a whole step and of the hook alone."""
        totals, hooks = [], []
        for number in range(steps):
            start = time.perf_counter()
            clock = _Stopwatch()
            with clock, guard.phase("data"):
                clock.pause()
                tokens, targets = corpus.batch(number, 0, 2, shape.context)
                clock.resume()
            with clock, guard.phase("forward"):
                clock.pause()
                loss = model(tokens, targets)
                clock.resume()
            with clock, guard.phase("backward"):
                clock.pause()
                loss.backward()
                clock.resume()
            with clock, guard.phase("optimizer"):
                clock.pause()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                clock.resume()
            value = float(loss.detach())
            with clock:
                guard.step(outer_step=1, inner_step=number, loss=value, lr=2e-3)
            totals.append(time.perf_counter() - start)
            hooks.append(clock.seconds)
        return statistics.median(totals), statistics.median(hooks)

    return train


class _NoGuard:
    """Stands in for the hook and does nothing."""

    def phase(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, **_: Any) -> None:
        return None


class _Stopwatch:
    """Adds up the time spent in the hook; the figures include this class's own two clock reads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> _Stopwatch:
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def resume(self) -> None:
        self._since = time.perf_counter()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._since
