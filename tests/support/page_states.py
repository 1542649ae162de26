"""Ten states of a miner, as a guard writes them to its state directory, for pictures and tests.
Each scenario describes only what happens to the miner; `simulated_guard` lets the guard respond."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.simulated_guard import SimulatedGuard

_OUT_OF_MEMORY = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/me/miner/train.py", line 180, in training_step
[rank2]:     loss.backward()
[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total \
capacity of 23.69 GiB of which 312.00 MiB is free.
"""


def healthy(root: Path) -> SimulatedGuard:
    """Three hours of training, every push verified."""
    guard = SimulatedGuard(root)
    guard.train(3)
    return guard


def hang(root: Path) -> SimulatedGuard:
    """Forty seconds after the guard detected a hang: it has restarted the miner."""
    guard = SimulatedGuard(root)
    guard.train(2)
    guard.hang(1, "train.py:212 next_batch")
    guard.wait(20)
    return guard


def loss_nan(root: Path) -> SimulatedGuard:
    """The loss became NaN half an hour ago; the gate blocks every upload."""
    guard = SimulatedGuard(root)
    guard.train(2)
    guard.train(0.5, loss=float("nan"))
    return guard


def blocked(root: Path) -> SimulatedGuard:
    """An upload is due, and the gate blocks it: the miner is training on an old base."""
    guard = SimulatedGuard(root)
    guard.train(2)
    guard.fall_behind()
    guard.train(0.51)
    return guard


def disk_full(root: Path) -> SimulatedGuard:
    """The disk of the state directory is full; training continues."""
    guard = SimulatedGuard(root)
    guard.train(2)
    guard.fill_disk()
    guard.train(0.1)
    return guard


def guard_gone(root: Path) -> SimulatedGuard:
    """The guard was killed, and its last status is old. The caller ages the file."""
    return healthy(root)


def no_gpu(root: Path) -> SimulatedGuard:
    """The driver is gone and the model trains on the CPU."""
    guard = SimulatedGuard(root, gpus=False, step_s=240.0)
    guard.train(1)
    return guard


def sixteen_ranks(root: Path) -> SimulatedGuard:
    """Sixteen ranks; the others wait for the thirteenth."""
    guard = SimulatedGuard(root, ranks=16)
    guard.train(1)
    guard.training.slow_rank = 12
    guard.train(0.5)
    return guard


def crash_loop(root: Path) -> SimulatedGuard:
    """The miner ran out of memory, and did so again after each restart; the guard has given up."""
    guard = SimulatedGuard(root)
    guard.train(2)
    while guard.crash(_OUT_OF_MEMORY):
        guard.wait(40)
    return guard


def week(root: Path) -> SimulatedGuard:
    """Seven days with two hangs, two hours of NaN, and five hours without a guard."""
    guard = SimulatedGuard(root, ranks=2, step_s=30.0)
    for day in range(7):
        guard.train(11)
        if day in (2, 5):
            guard.hang(1, "train.py:212 next_batch")
        if day == 3:
            guard.train(2, loss=float("nan"))
        if day == 4:
            guard.die(5)
            guard.start()
        guard.train(12)
    return guard


STATES: dict[str, Callable[[Path], SimulatedGuard]] = {
    "healthy": healthy,
    "hang": hang,
    "nan": loss_nan,
    "blocked": blocked,
    "disk-full": disk_full,
    "guard-gone": guard_gone,
    "no-gpu": no_gpu,
    "ranks-16": sixteen_ranks,
    "crash-loop": crash_loop,
    "week": week,
}
"""By name; call `write` to make the guard's state readable."""
