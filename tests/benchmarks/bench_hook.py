"""The cost of the hook inside a rank."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miner_guard.rank.environment import find
from miner_guard.rank.guard import Guard
from tests.benchmarks.frame import Row, per_call
from tests.support.listener import listening

TITLE = "The hook, per call"
CALLS = 20_000
_COLD_CALLS = 200
_SWEPT = bytearray(64 * 1024 * 1024)
_PHASES = ("data", "forward", "backward", "optimizer")


def run() -> list[Row]:
    """Compares a step and a phase with an empty loop and with other hooks, and measures the ranks'
    agreement."""
    return [*_steps(), *_others(), *(_agreement(ranks) for ranks in (2, 4, 8))]


def _steps() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, listening(Path(folder, "guard.sock")):
        guard = Guard(find({"RANK": "1", "WORLD_SIZE": "1"}, folder))
        phase = guard.phase("data")

        def step() -> None:
            guard.step(outer_step=1, inner_step=84, loss=3.4, lr=2.1e-5)

        def named_phase() -> None:
            with guard.phase("data"):
                pass

        def whole_step() -> None:
            for name in _PHASES:
                with guard.phase(name):
                    pass
            step()

        def kept_phase() -> None:
            with phase:
                pass

        empty = per_call(lambda: None, CALLS)
        return [
            Row("empty call", empty * 1e6, "µs"),
            Row("guard.step()", per_call(step, CALLS) * 1e6, "µs", "<= 5 µs"),
            Row("with guard.phase(name)", per_call(named_phase, CALLS) * 1e6, "µs", "<= 2.5 µs"),
            Row("with phase, kept", per_call(kept_phase, CALLS) * 1e6, "µs"),
            Row("worst of 20 000 steps", _worst(step) * 1e6, "µs"),
            Row("a step with four phases, hot", per_call(whole_step, CALLS) * 1e6, "µs"),
            Row(
                "a step with four phases, cold",
                _cold(whole_step) * 1e6,
                "µs",
                "<= 150 µs",
                "64 MiB written before each",
            ),
        ]


def _cold(call: Callable[[], None]) -> float:
    """The median time of calls with cold caches: before each call, other memory fills the
    processor's caches."""
    seconds = []
    for _ in range(_COLD_CALLS):
        _SWEPT.reverse()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _worst(step: Any) -> float:
    worst = 0.0
    for _ in range(CALLS):
        start = time.perf_counter()
        step()
        worst = max(worst, time.perf_counter() - start)
    return worst


def _others() -> list[Row]:
    title = "Lightning's SimpleProfiler, a section"
    if importlib.util.find_spec("lightning") is None:
        return [Row(title, None, "µs", note="lightning is not installed")]
    from lightning.pytorch.profilers import SimpleProfiler

    profiler = SimpleProfiler()

    def section() -> None:
        with profiler.profile("data"):
            pass

    return [
        Row(
            title,
            per_call(section, CALLS) * 1e6,
            "µs",
            note="keeps every duration: its memory grows",
        )
    ]


def _agreement(ranks: int) -> Row:
    title = f"may_upload over {ranks} ranks (the agreement and the rules)"
    if importlib.util.find_spec("torch") is None:
        return Row(title, None, "µs", note="torch is not installed")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=_rank, args=(rank, ranks, folder)) for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
            if worker.is_alive():
                worker.kill()
        answer = Path(folder) / "seconds.json"
        if not answer.exists():
            return Row(title, None, "µs", note="a rank failed")
        note = f"{ranks} processes on {os.cpu_count()} cores"
        return Row(title, statistics.median(json.loads(answer.read_text())) * 1e6, "µs", note=note)


def _rank(rank: int, ranks: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import miner_guard

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    guard = miner_guard.init()
    seconds = []
    for number in range(200):
        start = time.perf_counter()
        guard.may_upload(outer_step=1, inner_step=number)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds[20:]))
    dist.barrier()
    guard.close()
