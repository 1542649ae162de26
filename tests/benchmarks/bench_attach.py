"""The cost of attaching: at the start of any Python process, and per step of a script that does not
use the hook."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miner_guard import attach
from miner_guard.state_dir import StateDir
from tests.benchmarks.frame import Row
from tests.support.listener import listening

TITLE = "Attaching to an unmodified program"
STARTS = 25
STEPS = 2000
BLOCKS = (
    ("a tiny step", 0.0, 100, 40),
    ("a step of 2 ms", 0.002, 20, 60),
    ("a step of 50 ms", 0.05, 5, 30),
)
"""Name, CPU seconds, steps per block, pairs of blocks. Attached and detached blocks alternate, so
that both run under the same conditions. An extra step before each block is not counted: the hook
has not run during the previous block, so its code has left the caches, which never happens in an
attached program.

The clock runs while the hook does, from the forward pass on; the products before it fill the step
and empty the caches. They take the same time with and without the hook, but their own variation, a
millisecond in 50, would hide the hook's cost."""


def run() -> list[Row]:
    """Times the start of a Python process that is not a miner, and a training step, alternately
    with and without the guard."""
    return [*_start(), *_step()]


def _start() -> list[Row]:
    plain = dict(os.environ)
    ways = {"plain": plain, **{mode: attach.environment(mode, plain) for mode in attach.WATCHED}}
    ways["inside a rank"] = {**ways["sn38"], attach.ATTACHED: "1"}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(STARTS):
        for way, env in ways.items():
            seconds[way].append(_cpu_seconds_of_start(env))
    base = statistics.median(seconds.pop("plain"))
    rows = [Row("python -c pass, CPU", base * 1e3, "ms")]
    for way, measured in seconds.items():
        added = (statistics.median(measured) - base) * 1e3
        rows.append(Row(f"added at start, {way}, CPU", added, "ms", "<= 5 ms"))
    return rows


def _cpu_seconds_of_start(env: Mapping[str, str]) -> float:
    """CPU time rather than wall time, because other work on the machine is not a cost of
    attaching."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], env)
    _, _, usage = os.wait4(pid, 0)
    return usage.ru_utime + usage.ru_stime


def _step() -> list[Row]:
    if importlib.util.find_spec("torch") is None:
        return [Row("a step, attached", None, "µs", note="torch is not installed")]
    import torch
    import torch.optim.optimizer as optimizer_module

    from miner_guard.attach.adapter import Adapter
    from miner_guard.attach.auto import Auto

    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, square = torch.randn(8, 64), torch.randn(256, 256)

    def product() -> float:
        """CPU seconds of one product."""
        start = time.thread_time()
        for _ in range(STEPS):
            square @ square
        return (time.thread_time() - start) / STEPS

    def steps(number: int, products: int) -> float:
        """CPU seconds of this thread per step, because other work on the machine is not a cost of
        attaching."""
        seconds = []
        for _ in range(number + 1):
            for _ in range(products):
                square @ square
            start = time.thread_time()
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.thread_time() - start)
        return statistics.median(seconds[1:])

    each = min(product() for _ in range(3))
    backward: Any = torch.Tensor.backward
    hooks = optimizer_module._global_optimizer_post_hooks
    hooks_before = optimizer_module._global_optimizer_pre_hooks
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, listening(StateDir(Path(folder)).socket):
        os.environ["_MINER_GUARD_STATE_DIR"] = folder
        os.environ["RANK"] = "1"
        auto = Auto(Adapter("auto"))
        auto.follow_torch(optimizer_module)
        attached, own_hooks = torch.Tensor.backward, (dict(hooks_before), dict(hooks))
        steps(STEPS, 0)
        for name, lasts_s, number, pairs in BLOCKS:
            products = round(lasts_s / each)
            off, on = [], []
            for _ in range(pairs):
                setattr(torch.Tensor, "backward", backward)  # noqa: B010
                hooks_before.clear()
                hooks.clear()
                off.append(steps(number, products))
                setattr(torch.Tensor, "backward", attached)  # noqa: B010
                hooks_before.update(own_hooks[0])
                hooks.update(own_hooks[1])
                on.append(steps(number, products))
            added = statistics.median(b - a for a, b in zip(off, on, strict=True))
            alone = statistics.median(off) + products * each
            rows.append(Row(f"{name}, alone, CPU", alone * 1e3, "ms"))
            rows.append(Row(f"{name}, added by attach auto, CPU", added * 1e6, "µs", "<= 150 µs"))
        setattr(torch.Tensor, "backward", backward)  # noqa: B010
        hooks_before.clear()
        hooks.clear()
        for name in ("_MINER_GUARD_STATE_DIR", "RANK", attach.ATTACHED):
            os.environ.pop(name, None)
    return rows
