"""Checkpoints of a sharded run that are either complete or absent, never half-written.

torch.distributed.checkpoint writes asynchronously into a draft folder. When every rank's share is
there, rank 0 writes a manifest (sizes and crc32 of the files) and renames the folder to
`step-00000060`. A folder with such a name is complete. What a crash leaves behind has a different
name, and the next start removes it. All ranks must share one folder.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from miner_guard.checkpoints import manifest
from miner_guard.checkpoints.memory_tier import MemoryTier, NoRoom
from miner_guard.state_dir import STATE_DIR, StateDir

T = TypeVar("T")

_NAME = re.compile(r"step-(\d{8,})")
_DRAFT = ".draft-"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    step: int
    size_bytes: int
    seconds: float
    """Time from the request to the rename. Training continues during nearly all of it."""


@dataclass(frozen=True)
class Skipped:
    """An unusable checkpoint, and the reason why `resume` skipped it."""

    path: Path
    reason: str


class CheckpointError(Exception):
    """The named checkpoint is unusable, or writing one failed. The message is human-readable."""


class Checkpointer:
    """Saves a checkpoint every `every` steps and on request, keeps the last `keep`, and resumes
    from the newest complete one.

    Every method but `request`, `snapshot` and `settle` is collective: each rank must call it at the
    same point.
    The constructor creates a gloo group for the writer threads. If the default group has only the
    NCCL backend, some versions of torch cannot write asynchronously, and training waits for the
    write; to avoid that, create the group with `cpu:gloo,cuda:nccl`. The writer thread calls
    `on_saved` on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep: int = 3,
        on_saved: Callable[[Saved], None] = lambda _saved: None,
        memory_every: int | None = None,
        on_memory_off: Callable[[str], None] = lambda _reason: None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """`memory_every`: number of steps between snapshots in /dev/shm; None disables them. When a
        rank stops taking snapshots, it calls `on_memory_off` with the reason.

        `optimizers`: their parameters and states are copied while training continues; the next step
        of any optimizer waits for the copy. Pass every optimizer that changes the model only in its
        `step`, and call `settle` before anything else changes the model. Without optimizers,
        training waits for the whole copy.
        """
        if every < 1 or keep < 1:
            raise ValueError(f"every = {every} and keep = {keep} must be at least 1")
        self._folder = folder
        self._every = every
        self._keep = keep
        self._on_saved = on_saved
        self._requested = False
        self._pending: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for draft in folder.glob(f"{_DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)
        self._memory: MemoryTier | None = None
        self._memory_every = memory_every
        self._on_memory_off = on_memory_off
        if memory_every is not None:
            self._open_memory(optimizers)
        self._barrier()

    def _open_memory(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        state_dir = os.environ.get(STATE_DIR)
        home = StateDir(Path(state_dir) if state_dir else self._folder.absolute()).memory
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        try:
            self._memory = MemoryTier(home, self._rank, world_size, optimizers)
        except OSError as error:
            self._memory_off(f"{home}: {error.strerror or error}")

    def _memory_off(self, reason: str) -> None:
        """Stop taking snapshots. Training continues, and a restart resumes from disk."""
        if self._memory is not None:
            self._memory.close(remove=True)
            self._memory = None
        self._on_memory_off(reason)

    def snapshot(self, step: int, state: Callable[[], dict[str, Any]]) -> float:
        """Keep this rank's share of `state()` in memory, every `memory_every` steps.

        Call it after the optimizer's step. Does not wait for other ranks. Returns the seconds that
        training waited, here and in the optimizers' steps since the last snapshot. If the memory is
        too small, the rank stops taking snapshots and calls `on_memory_off` with the reason.
        """
        if self._memory is None or self._memory_every is None or step % self._memory_every:
            return 0.0
        try:
            return self._memory.save(step, state())
        except (NoRoom, OSError, RuntimeError) as error:
            self._memory_off(str(error))
            return 0.0

    def settle(self) -> None:
        """Wait until the last snapshot no longer needs the state's tensors. Optimizer
        steps call this; call it before anything else changes parameters or optimizer states."""
        if self._memory is not None:
            self._memory.settle()

    def request(self) -> None:
        """Make the next call to `due` return True whatever the step. Safe in a signal handler."""
        self._requested = True

    def due(self, step: int, *, asked: bool = False) -> bool:
        """Return True if a checkpoint is due after `step`. All ranks get the same answer if they
        pass the same `asked` and either all of them or none have called `request`."""
        return step % self._every == 0 or asked or self._requested

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Start writing `state` (tensors, DTensors, numbers). Waits for the previous checkpoint to
        be written, but not for this one.

        Raises CheckpointError if the previous checkpoint could not be written.
        """
        self.wait()
        self._requested = False
        draft = self._folder / f"{_DRAFT}{step:08d}"
        start = time.monotonic()
        written: Future[Any] = Future()
        if self._group is None:
            save(state, checkpoint_id=draft, no_dist=True)
            written.set_result(None)
        else:
            try:
                written = async_save(state, checkpoint_id=draft, process_group=self._group)  # type: ignore[assignment]
            except AssertionError:
                # Some versions of torch require a CPU backend in the default group even when they
                # are given a gloo group. Let training wait for the write instead of failing.
                save(state, checkpoint_id=draft, process_group=self._group)
                written.set_result(None)
        self._pending = self._writer.submit(self._finish, written, draft, step, start)

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete. Raises CheckpointError if writing
        failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"no checkpoint was written: {error}; check the space in {self._folder}"
            ) from error

    def close(self) -> None:
        """Wait for the pending checkpoint and end the writer thread. Deletes the
        in-memory snapshot, unless an exception is propagating: the next launch then
        resumes from the snapshot."""
        self.wait()
        self._writer.shutdown()
        if self._memory is not None:
            self._memory.close(remove=sys.exc_info()[1] is None)

    def _finish(self, written: Future[Any], draft: Path, step: int, start: float) -> None:
        # A rank's future completes when every rank's share and the common index are written,
        # because torch gathers the results first.
        written.result()
        if self._rank != 0:
            return
        size = manifest.seal(draft, step)
        path = self._folder / f"step-{step:08d}"
        # A requested checkpoint may repeat a step that is already saved; the rename needs a
        # free name.
        unnamed = [_unname(path)] if path.exists() else []
        os.replace(draft, path)
        manifest.fsync(self._folder)
        unnamed += [_unname(old) for old in sorted(_complete_ones(self._folder))[: -self._keep]]
        for old in unnamed:
            shutil.rmtree(old, ignore_errors=True)
        self._on_saved(Saved(path, step, size, time.monotonic() - start))

    def resume(
        self,
        state: dict[str, Any],
        which: str = "latest",
        on_skipped: Callable[[Skipped], None] = lambda _s: None,
    ) -> Path | None:
        """Load a checkpoint into `state`, in place: the newest complete one, or the one that
        `which` names (`step-…`). Loads the newest from memory if all ranks hold the same step there
        and the disk has no newer one.

        Returns the checkpoint's path, or None if there is no checkpoint. Skips damaged checkpoints
        and reports each through `on_skipped` on rank 0. Raises CheckpointError if a named
        checkpoint is damaged or missing.
        """
        if which == "latest":
            path = self._resume_from_memory(state, on_skipped)
            if path is not None:
                return path
        while True:
            path = self._agree(self._choose(which, on_skipped) if self._rank == 0 else None)
            if path is None:
                return None
            reason = self._load(state, path)
            if reason is None:
                return path
            if which != "latest":
                raise CheckpointError(f"{path}: {reason}")
            if self._rank == 0:
                on_skipped(Skipped(path, reason))
                os.replace(path, path.with_name(f"damaged-{path.name}"))

    def _resume_from_memory(
        self, state: dict[str, Any], on_skipped: Callable[[Skipped], None]
    ) -> Path | None:
        held = self._gather(None if self._memory is None else self._memory.whole())
        common = set.intersection(*(steps or set() for steps in held))
        if self._memory is None or not common:
            if self._rank == 0 and any(held):
                shown = ", ".join(str(sorted(steps or ())) for steps in held[:8])
                on_skipped(Skipped(Path("/dev/shm"), f"the ranks saved different steps: {shown}"))
            return None
        step = max(common)
        newest = max((_step_of(path) for path in _complete_ones(self._folder)), default=-1)
        if self._agree_step(newest) > step:
            return None
        path = Path("/dev/shm") / f"step-{step:08d}"
        reason = next((r for r in self._gather(self._memory.unfit(step, state)) if r), None)
        if reason is not None:
            if self._rank == 0:
                on_skipped(Skipped(path, reason))
            return None
        self._memory.load(step, state)
        return path

    def _gather(self, own: T) -> list[T]:
        """Return every rank's value, in rank order. Collective."""
        if self._group is None:
            return [own]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, own, group=self._group)
        return values

    def _agree_step(self, newest: int) -> int:
        """Return rank 0's step on every rank, because nodes that share a network disk may
        briefly see different folders."""
        return self._gather(newest)[0]

    def _choose(
        self, which: str, on_skipped: Callable[[Skipped], None]
    ) -> Path | CheckpointError | None:
        if which != "latest":
            path = self._folder / which
            reason = manifest.damage(path)
            return path if reason is None else CheckpointError(f"{path}: {reason}")
        for path in sorted(_complete_ones(self._folder), reverse=True):
            reason = manifest.damage(path)
            if reason is None:
                return path
            on_skipped(Skipped(path, reason))
        return None

    def _agree(self, chosen: Path | CheckpointError | None) -> Path | None:
        box = [chosen]
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group)
        if isinstance(box[0], CheckpointError):
            raise box[0]
        return box[0]

    def _load(self, state: dict[str, Any], path: Path) -> str | None:
        reason: str | None = None
        try:
            load(state, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - after any failure, try another checkpoint; it is reported
            reason = (
                f"cannot be loaded: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"
            )
        return next((r for r in self._gather(reason) if r is not None), None)

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)


def _step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    return -1 if match is None else int(match[1])


def _unname(checkpoint: Path) -> Path:
    """Rename a checkpoint before removing it, so that a crash midway leaves no partial folder with
    a valid name. Returns the new path."""
    unnamed = checkpoint.with_name(f"{_DRAFT}old-{checkpoint.name}")
    shutil.rmtree(unnamed, ignore_errors=True)
    os.replace(checkpoint, unnamed)
    return unnamed


def _complete_ones(folder: Path) -> Iterable[Path]:
    return (p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())
