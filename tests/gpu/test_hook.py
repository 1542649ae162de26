"""The hook beside a real device: it never synchronises, and costs nothing that can be measured."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner_guard.flight_recorder.reader import FlightReader
from miner_guard.rank.environment import find
from miner_guard.rank.guard import Guard
from miner_guard.rank.hot import compiled
from miner_guard.state_dir import StateDir
from tests.gpu.conftest import Table

pytestmark = pytest.mark.gpu

PHASES = ("data", "forward", "backward", "optimizer")


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(StateDir(tmp_path).socket))
        made = Guard(find({"RANK": "0", "WORLD_SIZE": "1"}, tmp_path))
        yield made
        made.close()


@contextlib.contextmanager
def no_synchronisation(cuda: bool) -> Iterator[None]:
    """Any call that waits for the GPU raises."""
    import torch

    if not cuda:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_call_of_the_hook_waits_for_the_gpu(
    guard: Guard, cuda: bool, table: Table, tmp_path: Path
) -> None:
    import torch

    device = "cuda" if cuda else "cpu"
    loss = torch.ones((), device=device)
    with no_synchronisation(cuda):
        for name in (*PHASES, "val_loss", "upload"):
            with guard.phase(name):
                pass
        guard.step(outer_step=1, inner_step=1, loss=3.4, lr=1e-4, grad_norm=1.0)
        guard.step(outer_step=1, inner_step=2, loss=loss, grad_norm=loss)
        guard.may_upload(outer_step=1, inner_step=2, loss=loss)
        guard.upload_due()
        guard.checkpoint_requested()
    steps = list(FlightReader(StateDir(tmp_path).flight_of(0)).steps())
    assert [step.loss for step in steps] == [3.4, None if cuda else 1.0]
    assert (steps[0].allocated_bytes is not None) == cuda
    table.add("hook calls that synchronised", 0 if cuda else None, "0")


def _blocks(step: Callable[[], None], blocks: int, seconds: float) -> list[float]:
    """Seconds of a step, by block."""
    times = []
    for _ in range(blocks):
        count, started = 0, time.perf_counter()
        while (taken := time.perf_counter() - started) < seconds:
            step()
            count += 1
        times.append(taken / max(count, 1))
    return times


def test_training_is_as_fast_with_the_guard(guard: Guard, cuda: bool, table: Table) -> None:
    import torch

    device = "cuda" if cuda else "cpu"
    side = 8192 if cuda else 512
    a = torch.randn(side, side, device=device)

    def train() -> None:
        for _ in PHASES:
            torch.mm(a, a)
        if cuda:
            torch.cuda.synchronize()

    def guarded() -> None:
        for name in PHASES:
            with guard.phase(name):
                torch.mm(a, a)
        if cuda:
            torch.cuda.synchronize()
        guard.step(outer_step=1, loss=3.4, lr=1e-4)

    _blocks(guarded, 2, 0.2)
    ratios = []
    for _ in range(10):
        (without,), (with_guard,) = _blocks(train, 1, 0.5), _blocks(guarded, 1, 0.5)
        ratios.append(with_guard / without)
    ratio = statistics.median(ratios)
    table.add("step time with the guard / without", round(ratio, 5), "<= 1.001")
    table.add("hot path of the hook", "compiled" if compiled()[0] is not None else "Python")
    if cuda:
        assert ratio <= 1.001
    assert ratio < 1.5, f"on {os.cpu_count()} cores"
