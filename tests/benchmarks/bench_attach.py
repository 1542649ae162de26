"""What attaching costs: at the start of every Python, and per step of a script that knows nothing
of it."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from miner_guard import attach
from tests.benchmarks.frame import Row

TITLE = "Attaching to an unmodified program"
STARTS = 25
STEPS = 2000


def run() -> list[Row]:
    """Start-up of a Python that is no miner, and a training step, with and without, in
    alternation."""
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
    """CPU time, not wall time: what else runs on the machine is not the attach's cost."""
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
    inputs = torch.randn(8, 64)

    def steps(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / number

    steps(STEPS)
    backward: Any = torch.Tensor.backward
    hooks = optimizer_module._global_optimizer_post_hooks
    with tempfile.TemporaryDirectory() as folder:
        os.environ["_MINER_GUARD_STATE_DIR"] = folder
        # Another rank than 0 does not print by itself where no supervisor listens.
        os.environ["RANK"] = "1"
        auto = Auto(Adapter("auto"))
        auto.follow_torch(optimizer_module)
        attached, own_hooks = torch.Tensor.backward, dict(hooks)
        steps(STEPS)
        off, on = [], []
        for _ in range(10):
            setattr(torch.Tensor, "backward", backward)  # noqa: B010
            hooks.clear()
            off.append(steps(STEPS // 4))
            setattr(torch.Tensor, "backward", attached)  # noqa: B010
            hooks.update(own_hooks)
            on.append(steps(STEPS // 4))
        setattr(torch.Tensor, "backward", backward)  # noqa: B010
        hooks.clear()
        for name in ("_MINER_GUARD_STATE_DIR", "RANK", attach.ATTACHED):
            os.environ.pop(name, None)
    base, guarded = statistics.median(off), statistics.median(on)
    return [
        Row("a tiny step, alone", base * 1e6, "µs"),
        Row("added by attach auto", (guarded - base) * 1e6, "µs", "<= 1000 µs (0.1 % of 1 s)"),
    ]
