"""The cost of the checks before a start and of a sampling round, and how `diagnose` grows with the
number of ranks."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miner_guard.checks.nvml import NvmlSampler
from tests.benchmarks.frame import Row
from tests.support.fake_nvml import FakeNvml, build

TITLE = "Diagnosis: preflight, GPU sampling, `guard.diagnose` across ranks"

_GUARD = [sys.executable, "-c", "from miner_guard.cli.main import main; main()"]
_STARTS = 3
_RANKS = (2, 4, 8, 16)
_PROJECTED = 1024
_CALLS = 5


def run() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-diagnosis-") as folder:
        library = _library(Path(folder))
        return [*_preflight(Path(folder), library), *_sampling(library), *_diagnose()]


def _library(folder: Path) -> FakeNvml | None:
    if shutil.which("cc") is None:
        return None
    (folder / "lib").mkdir()
    fake = FakeNvml(folder, build(folder / "lib"))
    fake.set(count=8)
    return fake


def _first_line_s(folder: Path, env: dict[str, str], python: str, *flags: str) -> float:
    """Seconds from the start of `run` to the miner's first line; the median of several starts."""
    seconds = []
    for number in range(_STARTS):
        state = folder / f"state-{len(flags)}-{number}-{time.monotonic_ns()}"
        start = time.monotonic()
        process = subprocess.Popen(
            [
                *_GUARD,
                "run",
                "--no-restart",
                *flags,
                "--",
                python,
                "-c",
                "print('first line', flush=True)",
            ],
            env={**os.environ, **env, "MINER_GUARD_STATE_DIR": str(state)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("first line"):
                seconds.append(time.monotonic() - start)
                break
        process.communicate()
    return statistics.median(seconds)


def _preflight(folder: Path, fake: FakeNvml | None) -> list[Row]:
    without = _first_line_s(folder, {}, sys.executable, "--no-preflight")
    on_cpu = _first_line_s(folder, {}, sys.executable)
    rows = [
        Row("`run` to the miner's first line, no preflight", without, "s"),
        Row(
            "the same with preflight, no GPU expected",
            on_cpu,
            "s",
            note=f"{on_cpu / without:.1f} times",
        ),
    ]
    if fake is None:
        return [*rows, Row("the same with 8 fake GPUs", None, "s", note="no C compiler")]
    python = folder / "python3"
    stand_in = Path(__file__).parent.parent / "support" / "fakes" / "torch_with_cuda"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={stand_in} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    on_gpus = _first_line_s(folder, fake.env, str(python))
    note = f"{on_gpus / without:.1f} times; a child per GPU, without torch's own import"
    return [*rows, Row("the same with 8 fake GPUs", on_gpus, "s", note=note)]


def _sampling(fake: FakeNvml | None) -> list[Row]:
    if fake is None:
        return [Row("a sampling round of 8 fake GPUs", None, "ms", note="no C compiler")]
    sampler = NvmlSampler(30, {**os.environ, **fake.env})
    try:
        start = time.monotonic()
        sampler.sample()
        first = time.monotonic() - start
        rounds = []
        for _ in range(30):
            start = time.monotonic()
            sampler.sample()
            rounds.append(time.monotonic() - start)
    finally:
        sampler.close()
    return [
        Row("first sample of 8 fake GPUs, child started", 1e3 * first, "ms"),
        Row(
            "a sampling round of 8 fake GPUs",
            1e3 * statistics.median(rounds),
            "ms",
            note="about 40 NVML calls per GPU, each of which reads the state file",
        ),
    ]


def _diagnose() -> list[Row]:
    import torch

    # Imported before the fork, so that sixteen ranks do not each spend seconds on it.
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(100)))
    seconds = {n: _gathered_s(n, model) for n in _RANKS}
    per_rank, base = statistics.linear_regression(list(seconds), list(seconds.values()))
    rows = [
        Row(
            f"`diagnose` with {n} ranks, on rank 0",
            1e3 * s,
            "ms",
            note="200 parameters; ranks share 2 cores",
        )
        for n, s in seconds.items()
    ]
    projected = base + per_rank * _PROJECTED
    note = (
        f"line through the above, {1e6 * per_rank:.0f} µs a rank, with the ranks on these "
        "cores; not measured"
    )
    return [*rows, Row(f"projected to {_PROJECTED:,} ranks", 1e3 * projected, "ms", note=note)]


def _gathered_s(ranks: int, model: Any) -> float:
    context = multiprocessing.get_context("fork")
    together, answers = context.Barrier(ranks), context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = functools.partial(
        _rank, ranks=ranks, port=port, together=together, answers=answers, model=model
    )
    children = [context.Process(target=rank, args=(r,)) for r in range(ranks)]
    for child in children:
        child.start()
    seconds: Sequence[float] = answers.get()
    for child in children:
        child.join()
    return statistics.median(seconds)


def _rank(rank: int, *, ranks: int, port: int, together: Any, answers: Any, model: Any) -> None:
    import torch.distributed as dist

    from miner_guard.rank import diagnose

    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    host: Any = SimpleNamespace(rank=rank, local_rank=rank, world_size=ranks)
    seconds = []
    for call in range(_CALLS):
        together.wait()
        start = time.monotonic()
        own = diagnose.report(host, model, batch_size=2, effective_batch_size=512)
        reports = diagnose.gather(dist.PrefixStore(str(call), store), own, ranks, 60.0)
        seconds.append(time.monotonic() - start)
        assert rank != 0 or not any(r.get("error") for r in reports)
        together.wait()
    if rank == 0:
        answers.put(seconds)
    together.wait()
