"""The cost of judging a step, hot in a loop and cold after sweeping the caches, and how soon a
fault is detected."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miner_guard.config import GpuSettings, LossSettings, StepSettings
from miner_guard.rank.layout import StepRecord
from miner_guard.system.clock import FakeClock
from miner_guard.watch import trace_reading as reading
from miner_guard.watch.base import Monitor
from miner_guard.watch.curves import CurvesMonitor, LossWatch, MemoryWatch
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.ranks import Observation, RanksMonitor, RankWatch, StragglerWatch
from miner_guard.watch.steps import RegressionWatch, StepsMonitor, StepTimes
from miner_guard.watch.trace import judge
from tests.benchmarks.frame import Row
from tests.support.contexts import context

TITLE = "Detectors: cost per step, delay in steps"

_FACTS = TrainingFacts()
_COLD_CALLS = 60
_SWEPT = bytearray(64 * 1024 * 1024)


def run() -> list[Row]:
    return [*_costs(), *_whole_step(), *_trace(), *_delays()]


def _losses(seed: int = 1) -> Iterator[float]:
    source = random.Random(seed)
    step = 0
    while True:
        step += 1
        yield (2 + 5 * step**-0.3) * source.gauss(1, 0.02)


def _costs() -> Iterator[Row]:
    source = random.Random(2)
    times, regression = StepTimes(StepSettings()), RegressionWatch(0.75)
    loss, losses = LossWatch(LossSettings()), _losses()
    memory, rank = MemoryWatch(LossSettings()), RankWatch(GpuSettings(), StepSettings())
    straggler = StragglerWatch(StepSettings())
    number = [0]

    def one_straggler() -> None:
        number[0] += 1
        for r in range(4):
            list(
                straggler.observe(
                    r, number[0], 15.0, {"data": 0.1, "forward": 5.0, "collective": 1.0}, ranks=4
                )
            )

    judges: dict[str, Callable[[], Any]] = {
        "step time": lambda: (times.observe(15 * source.gauss(1, 0.03)), regression.observe(15.0)),
        "loss": lambda: list(loss.observe(1, next(losses), _FACTS)),
        "memory": lambda: memory.observe(1, 18.4 + 0.1 * source.random()),
        "CPU fallback": lambda: rank.observe(Observation(15.0, {"data": 0.1}, 18.4, False)),
        "straggler, 4 ranks": one_straggler,
    }
    for name, call in judges.items():
        yield from _hot_and_cold(name, call)


def _hot_and_cold(name: str, call: Callable[[], Any]) -> Iterator[Row]:
    for _ in range(300):
        call()
    hot = []
    for _ in range(2000):
        start = time.perf_counter()
        call()
        hot.append(time.perf_counter() - start)
    cold = []
    for _ in range(_COLD_CALLS):
        _sweep()
        start = time.perf_counter()
        call()
        cold.append(time.perf_counter() - start)
    yield Row(f"{name}, hot", 1e6 * statistics.median(hot), "µs a step")
    yield Row(
        f"{name}, cold",
        1e6 * statistics.median(cold),
        "µs a step",
        note="64 MiB written before each call",
    )


def _sweep() -> None:
    for place in range(0, len(_SWEPT), 4096):
        _SWEPT[place] ^= 1


def _monitors(clock: FakeClock) -> list[Monitor]:
    around = context(Path("/nonexistent"), clock=clock)
    return [StepsMonitor(around), CurvesMonitor(around), RanksMonitor(around)]


def _step(number: int, start: float, seconds: float, loss: float) -> StepRecord:
    return StepRecord(
        number=number,
        outer_step=1,
        inner_step=number,
        total_steps=number,
        start=start,
        end=start + seconds,
        wall=1e9,
        loss=loss,
        lr=2e-4,
        allocated_bytes=18 * 1024**3,
        phases={"data": 0.1, "forward": 5.0, "backward": 9.0},
    )


def _whole_step() -> Iterator[Row]:
    clock = FakeClock()
    monitors = _monitors(clock)
    losses = _losses()
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        record = [_step(number, clock.monotonic(), 15.0, next(losses))]
        clock.advance(15.0)
        for monitor in monitors:
            for rank in range(4):
                list(monitor.on_steps(rank, record))

    for row in _hot_and_cold("all parts of the supervisor, 4 ranks", step):
        share = (row.value or 0) / 1e6 / 10
        yield Row(
            row.what, row.value, row.unit, "< 0.1 % of a 10 s step", f"{share:.4%} of a 10 s step"
        )


def _trace() -> Iterator[Row]:
    losses = _losses()
    lines = [
        f'{{"step": {n}, "loss": {next(losses):.4f}, "step_time": 15.0, "gpu_mem_gb": 18.4}}'
        for n in range(20_000)
    ]
    start = time.perf_counter()
    judge(reading.read(lines))
    yield Row("explain --trace, 20,000 steps", time.perf_counter() - start, "s")


def _delays() -> Iterator[Row]:
    """Steps from the first bad one to the finding, in simulated runs with 3 % noise; the median of
    20 runs."""
    for name, event, change in (
        ("slow step (4 times)", "slow_step", lambda n, t, v: (4 * t if n == 200 else t, v)),
        ("NaN", "loss_nan", lambda n, t, v: (t, math.nan if n >= 200 else v)),
        (
            "spike (1.6 times), as a remark",
            "loss_spike",
            lambda n, t, v: (t, 1.6 * v if n == 200 else v),
        ),
        ("explosion (5 times)", "loss_divergence", lambda n, t, v: (t, 5 * v if n >= 200 else v)),
        (
            "climb (0.4 % a step)",
            "loss_divergence",
            lambda n, t, v: (t, v * (1 + 0.004 * max(0, n - 200))),
        ),
        (
            "lasting slowdown (1.6 times)",
            "steps_regressed",
            lambda n, t, v: (1.6 * t if n >= 200 else t, v),
        ),
    ):
        delays = [_delay(seed, event, change) for seed in range(20)]
        seen = [d for d in delays if d is not None]
        value = statistics.median(seen) if seen else None
        yield Row(
            f"delay: {name}", value, "steps", note=f"seen in {len(seen)} of {len(delays)} runs"
        )


def _delay(
    seed: int, event: str, change: Callable[[int, float, float], tuple[float, float]]
) -> int | None:
    clock = FakeClock()
    monitors = _monitors(clock)
    source = random.Random(seed)
    losses = _losses(seed)
    for number in range(600):
        seconds, loss = change(number, 15 * source.gauss(1, 0.03), next(losses))
        record = [_step(number, clock.monotonic(), seconds, loss)]
        clock.advance(seconds)
        for monitor in monitors:
            for finding in monitor.on_steps(0, record):
                if finding.event == event and number >= 200:
                    return number - 200
    return None
