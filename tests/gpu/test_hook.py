"""The hook on a real device: it never synchronises, and its cost is too small to measure."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner_guard.rank.environment import find
from miner_guard.rank.guard import Guard
from miner_guard.record.events import event
from tests.faults.guarded import Guarded
from tests.gpu.conftest import Table
from tests.gpu.machine import Machine
from tests.support.ranks import Ranks, listening

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PHASES = ("data", "forward", "backward", "optimizer")
BLOCK_S = 0.25
PAIRS = 60


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with listening() as listener:
        yield listener


@pytest.fixture
def guard(tmp_path: Path, ranks: Ranks) -> Iterator[Guard]:
    made = Guard(find({"RANK": "0", "WORLD_SIZE": "1", **ranks.env}, tmp_path))
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
    guard: Guard, ranks: Ranks, cuda: bool, table: Table, tmp_path: Path
) -> None:
    import torch

    device = "cuda" if cuda else "cpu"
    loss = torch.ones((), device=device)
    model = torch.nn.Linear(8, 8, device=device)
    with no_synchronisation(cuda):
        guard.diagnose(model, batch_size=2, effective_batch_size=512)
        for name in (*PHASES, "val_loss", "upload"):
            with guard.phase(name):
                pass
        guard.step(outer_step=1, inner_step=1, loss=3.4, lr=1e-4, grad_norm=1.0)
        guard.step(outer_step=1, inner_step=2, loss=loss, grad_norm=loss)
        decision = guard.may_upload(outer_step=1, inner_step=84, loss=loss)
        if decision:
            with guard.upload(decision):
                pass
        guard.upload_due()
        guard.checkpoint_requested()
        guard.checkpoint_saved(tmp_path / "step-1", step=1, seconds=1.0, size_bytes=1)
        guard.emit(
            event(
                "checkpoint",
                "info",
                "CHECKPOINT RESUMED: here at step 1",
                rank=0,
                path="here",
                step=1,
            )
        )
        guard.close(finished=True)
    steps = ranks.steps()
    assert [step.loss for step in steps] == [3.4, None if cuda else 1.0]
    assert (steps[0].allocated_bytes is not None) == cuda
    # The hook catches what is raised in it: a wait would show as a degradation, not as an error.
    degraded = ranks.messages()
    assert not [words for words in degraded if "synchronizing" in words], degraded
    table.add("hook calls that synchronised", 0 if cuda else None, "0")


def test_an_attached_program_never_waits_for_the_gpu(
    guarded: Guarded, machine: Machine, table: Table
) -> None:
    command = [sys.executable, "-m", "tests.gpu.miners.unhooked", guarded.token]
    process = guarded.start(
        command,
        "--attach",
        "auto",
        "--no-restart",
        settings={"logs.step_lines_per_s": 100},
        env=machine.env,
    )
    assert process.wait(120) == 0, guarded.tail()
    assert "the program made 40 steps" in guarded.output.read_text()
    assert "synchronizing" not in guarded.state.log.read_text()
    steps = guarded.named("inner_step")
    assert steps
    assert steps[-1]["inner_step"] >= 38
    table.add("--attach auto: calls that synchronised", 0 if machine.cuda else None, "0")


def _seconds_of(step: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds per step by `clock`, measured over at least BLOCK_S."""
    count, started = 0, clock()
    while (taken := clock() - started) < BLOCK_S or not count:
        step()
        count += 1
    return taken / count


def test_training_is_as_fast_with_the_guard(guard: Guard, cuda: bool, table: Table) -> None:
    import torch

    if cuda:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    else:
        a = torch.randn(512, 512)

    def work() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def train() -> None:
        for _ in PHASES:
            work()
        if cuda:
            torch.cuda.synchronize()

    def guarded_step() -> None:
        for name in PHASES:
            with guard.phase(name):
                work()
        if cuda:
            torch.cuda.synchronize()
        guard.step(outer_step=1, loss=3.4, lr=1e-4)

    # On a shared CPU, this would measure the time of other processes.
    clock = time.perf_counter if cuda else time.process_time
    _seconds_of(guarded_step, clock)
    ratios = []
    for pair in range(PAIRS if cuda else PAIRS // 6):
        # Alternate the order: a GPU that warms up in the meantime then slows down both alike.
        ways = (train, guarded_step) if pair % 2 else (guarded_step, train)
        seconds = {way: _seconds_of(way, clock) for way in ways}
        ratios.append(seconds[guarded_step] / seconds[train])
    low, ratio, high = _median_and_bounds(ratios)
    words = f"{ratio:.5f} (95 %: {low:.5f}-{high:.5f}, {len(ratios)} pairs)"
    table.add("step time with the guard / without", words, "<= 1.001")
    if cuda:
        assert low <= 1.001, f"even the least that these pairs allow is more: {words}"
    assert ratio < 1.5, f"on {os.cpu_count()} cores"


def _median_and_bounds(values: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that bound its 95 % confidence interval (normal
    approximation to the binomial)."""
    ordered = sorted(values)
    half = 0.98 * len(ordered) ** 0.5
    middle = len(ordered) / 2
    low = ordered[max(0, int(middle - half))]
    high = ordered[min(len(ordered) - 1, int(middle + half))]
    return low, statistics.median(ordered), high
