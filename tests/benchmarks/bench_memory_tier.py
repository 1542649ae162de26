"""Checkpoints in memory compared with their peers: the time that training waits, the bytes, and the
time from a fault to the first new step."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.frame import Row
from tests.faults.guarded import Guarded, when
from tests.faults.restarted_demo import ON_DISK_EVERY, RestartedDemo

TITLE = "Checkpoints in memory, the same model and state"

_ROUNDS = 3
_STEP_TARGET = "<= 5 % of a step"


@dataclass(frozen=True)
class Way:
    """One way to save."""

    save: Callable[[int], None]
    """Saves the state of a step; returns as soon as training may continue."""

    finish: Callable[[], object]
    """Waits until everything is saved."""

    waited_later: Callable[[], float] = lambda: 0.0
    """Seconds that the optimizer's next step waited for the copy."""


def run() -> list[Row]:
    """Measures in one process how long each way to save blocks training and how many bytes it
    keeps in memory, then how the demo recovers."""
    if importlib.util.find_spec("torch") is None:
        return [Row("a snapshot", None, "s", note="torch is not installed")]
    return [*_blocking(), *_recovery()]


class Training:
    """A GPT of 12.6 million parameters with AdamW: 151 MB of state."""

    def __init__(self) -> None:
        import torch

        from miner_guard.demo.corpus import Corpus, standard_library
        from miner_guard.demo.model import ByteGPT, Shape

        self._shape = Shape(layers=4, width=512, context=256)
        self.model = ByteGPT(self._shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._corpus = Corpus(standard_library(), 38, 0)
        self._number = 0
        self.step()

    def step(self) -> float:
        """Duration of one step over 2,048 tokens, in seconds."""
        start = time.monotonic()
        self._number += 1
        tokens, targets = self._corpus.batch(self._number, 0, 8, self._shape.context)
        self.model(tokens, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.monotonic() - start

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def size(self) -> int:
        tensors = [*self.model.state_dict().values()]
        for slots in self.optimizer.state.values():
            tensors += [v for v in slots.values() if hasattr(v, "numel")]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class _Times:
    """Timings of one way to save, one per round; each round follows a step without a save."""

    waits: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    """CPU seconds of the training thread, which a busy machine does not inflate."""

    shares: list[float] = field(default_factory=list)
    """Waiting time as a share of the preceding step."""

    beside: list[float] = field(default_factory=list)
    """Step time alongside the background part / step time without it."""


def _blocking() -> Iterator[Row]:
    training = Training()
    size = training.size()
    times: dict[str, _Times] = {}
    steps: list[float] = []
    with ExitStack() as stack:
        ways: dict[str, tuple[Way, Path]] = {}
        for name, make in WAYS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            try:
                ways[name] = (stack.enter_context(make(training, folder)), folder)
            except ImportError as error:
                yield Row(f"{name}: training waits", None, "ms", note=f"{error}")
        # Alternate, so that all run under the same conditions; the first round reserves memory.
        for number in range(1, _ROUNDS + 2):
            for name, (way, _) in ways.items():
                steps.append(_measure(training, way, number, times.setdefault(name, _Times())))
        held = {
            name: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            for name, (_, folder) in ways.items()
        }
    alone = statistics.median(steps)
    note = f"2 048 tokens, {size / 1e6:.0f} MB of state"
    yield Row("a step, nothing saved", alone, "s", note=note)
    for name, each in times.items():
        target = _STEP_TARGET if name == OURS else ""
        middle = {key: statistics.median(values[1:]) for key, values in vars(each).items()}
        share = (
            f"{100 * middle['shares']:.1f} % of a step; {1e3 * middle['own']:.0f} ms of its own "
            f"processor time; the step beside it {middle['beside']:.2f} x"
        )
        yield Row(f"{name}: training waits", 1e3 * middle["waits"], "ms", target, share)
        yield Row(f"{name}: bytes in /dev/shm", held[name] / size, "x the state")


def _measure(training: Training, way: Way, number: int, times: _Times) -> float:
    """Time one save and the steps around it; returns the seconds of the step before it."""
    alone = training.step()
    start, cpu = time.monotonic(), time.thread_time()
    way.save(number)
    waited = time.monotonic() - start
    times.own.append(time.thread_time() - cpu)
    beside = training.step()
    waited += way.waited_later()
    times.waits.append(waited)
    times.shares.append(waited / alone)
    times.beside.append(beside / alone)
    # Pending writes must not slow down the step of the next way to save.
    way.finish()
    return alone


OURS = "miner-guard's memory tier"


@contextmanager
def _ours(training: Training, folder: Path) -> Iterator[Way]:
    from miner_guard.checkpoints.memory_tier import MemoryTier

    tier = MemoryTier(folder, 0, 1, (training.optimizer,))

    def save(step: int) -> None:
        tier.save(step, training.state())

    yield Way(save, tier.wait, lambda: tier.waited_s)
    tier.close(remove=False)


@contextmanager
def _dcp(training: Training, folder: Path) -> Iterator[Way]:
    """torch.distributed.checkpoint.async_save into /dev/shm, keeping the last two."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import async_save

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    pending: list[Any] = []

    def save(step: int) -> None:
        if pending:
            pending.pop().result()
            shutil.rmtree(folder / f"step-{step - 2}", ignore_errors=True)
        pending.append(async_save(training.state(), checkpoint_id=folder / f"step-{step}"))

    try:
        yield Way(save, lambda: pending[-1].result())
    finally:
        dist.destroy_process_group()


@contextmanager
def _torch_save(training: Training, folder: Path) -> Iterator[Way]:
    import torch

    def save(step: int) -> None:
        draft = folder / "draft"
        torch.save(training.state(), draft)
        os.replace(draft, folder / f"slot-{step % 2}")

    yield Way(save, lambda: None)


@contextmanager
def _nvrx(training: Training, folder: Path) -> Iterator[Way]:
    """NVRx's LocalCheckpointManager, set up as in its usage guide: asynchronous, in /dev/shm."""
    import torch.distributed as dist

    if not next(training.model.parameters()).is_cuda:
        raise ImportError("NVRx 0.4 refuses tensors that are not on a GPU")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
            BasicTensorAwareStateDict,
        )
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            LocalCheckpointManager,
        )

        manager = LocalCheckpointManager(folder)
        queue = AsyncCallsQueue()

        def save(step: int) -> None:
            queue.maybe_finalize_async_calls(blocking=True)
            state = BasicTensorAwareStateDict(training.state())
            request = manager.save(state, step, is_async=True)
            queue.schedule_async_request(request)

        yield Way(save, lambda: queue.maybe_finalize_async_calls(blocking=True))
        queue.close()
    finally:
        dist.destroy_process_group()


WAYS = {
    OURS: _ours,
    "torch DCP async_save": _dcp,
    "torch.save": _torch_save,
    "NVRx local checkpoint": _nvrx,
}


def _recovery() -> Iterator[Row]:
    """The demo with two ranks under a guard: time from SIGKILL of one rank to the first new step,
    resumed from memory, and from disk when the last launch kept no snapshot."""
    every = f"from disk, every {ON_DISK_EVERY} steps"
    for name, memory in (("from memory", True), (every, False)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                seconds, lost = _recover(Path(folder), memory=memory)
            except AssertionError as error:
                # Under high load, the demo's steps take longer than this test waits for them.
                note = f"load {os.getloadavg()[0]:.0f}: {str(error)[:60]}"
                yield Row(f"fault -> first new step, {name}", None, "s", note=note)
                continue
        yield Row(f"fault -> first new step, {name}", seconds, "s")
        yield Row(f"steps lost, {name}", lost, "", "<= 1" if memory else "")


def _recover(folder: Path, *, memory: bool) -> tuple[float, int]:
    """Seconds from the kill to the first new step, and the number of steps lost."""
    guarded = Guarded(folder)
    demo = RestartedDemo(guarded, folder)
    try:
        demo.start()
        if not memory:
            demo.reach(ON_DISK_EVERY)
        at = demo.past_a_checkpoint()
        if not memory:
            # The next snapshot finds no folder, and the tier stays off from then on.
            gone = guarded.state.memory.with_suffix(".gone")
            guarded.state.memory.rename(gone)
            at = demo.reach(2)
            shutil.rmtree(gone)
        killed = time.time()
        demo.kill(demo.ranks()[1])
        resumed = demo.resume()
        steps = [e for e in guarded.named("inner_step") if when(e) > when(resumed)]
        return when(steps[0]) - killed, at - resumed["step"]
    finally:
        guarded.clean()
