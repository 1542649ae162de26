"""Checkpoints that a restart can trust: complete or absent, and finite or not written.

`torch.distributed.checkpoint` writes and reads them; this adds what it leaves to its caller. A
checkpoint is written into a draft and then renamed to `step-00000060`: a folder of that name is
complete, and what a crash leaves has another name. A state with a NaN or an infinity, in its loss
or in any tensor, is not written, so no launch resumes one. The last `keep` are kept.

A snapshot is each rank's own part of the state in a file in /dev/shm, which outlives the ranks and
the guard but not the machine. No rank waits for another to write it, and every rank of the next
launch, on whatever node, must have the same step and place.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from miner_guard.state_dir import STATE_DIR, StateDir

T = TypeVar("T")

_NAME = re.compile(r"step-(\d{8,})")
_DRAFT = ".draft-"
_SNAPSHOTS_KEPT = 2
"""The newest may be incomplete on a rank that dies: the one before it is whole."""


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
    """No checkpoint is usable, or writing one failed."""


class Checkpointer:
    """Saves a checkpoint every `every` steps and on request, and resumes from the newest.

    Every method but `snapshot` is collective: each rank calls it at the same point. All ranks share
    `folder`. The constructor creates a gloo group for the writer thread. If the default group has
    only the NCCL backend, some versions of torch write while training waits; `cpu:gloo,cuda:nccl`
    avoids that.
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
    ) -> None:
        """`on_saved`: called on rank 0, in the writer thread. `memory_every`: steps between
        snapshots in /dev/shm; None for none. `on_memory_off`: called with the reason when the rank
        stops taking them, because the memory is full or cannot be written."""
        if every < 1 or keep < 1:
            raise ValueError(f"every = {every} and keep = {keep} must be at least 1")
        self._folder, self._every, self._keep = folder, every, keep
        self._on_saved, self._on_memory_off = on_saved, on_memory_off
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._stop_may_follow = False
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for draft in folder.glob(f"{_DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)
        self._memory_every = memory_every or 1
        self._memory: _Snapshots | None = None
        if memory_every is not None:
            state_dir = os.environ.get(STATE_DIR)
            home = StateDir(Path(state_dir) if state_dir else folder.absolute()).memory
            try:
                self._memory = _Snapshots(home, self._rank)
            except OSError as error:
                self._turn_memory_off(f"{home}: {error.strerror or error}")
        # No rank may begin a draft before rank 0 has removed the old ones.
        self._gather(None)

    def due(self, step: int, *, asked: bool = False) -> bool:
        """Whether a checkpoint is due after `step`; all ranks must pass the same `asked`. The next
        `save` then waits for the write, because a SIGTERM may follow."""
        self._stop_may_follow = asked
        return step % self._every == 0 or asked

    def save(self, step: int, state: dict[str, Any], *, loss: float | None = None) -> str | None:
        """Start writing `state` (tensors, DTensors, numbers). Waits for the previous checkpoint to
        be written, but not for this one.

        Returns None, or why the state is not worth keeping: what is not finite on which rank.
        Raises CheckpointError if the previous checkpoint could not be written.
        """
        self.wait()
        if reason := next(filter(None, self._gather(_flaw(state, loss, self._rank))), None):
            return reason
        draft, start = self._folder / f"{_DRAFT}{step:08d}", time.monotonic()
        group, written = self._group, None
        if group is not None:
            # Some versions of torch require a CPU backend in the default group even when they are
            # given a gloo group. Let training wait for the write then instead of failing.
            with contextlib.suppress(AssertionError):
                written = async_save(state, checkpoint_id=draft, process_group=group)
        if written is None:
            save(state, checkpoint_id=draft, process_group=group, no_dist=group is None)
        self._pending = self._writer.submit(self._complete, written, draft, step, start)
        if self._stop_may_follow:
            self.wait()
        return None

    def snapshot(
        self, step: int, state: Callable[[], dict[str, Any]], *, loss: float | None = None
    ) -> None:
        """Keep this rank's part of `state()` in memory, every `memory_every` steps, if it is
        finite. Training waits for the copy. Not collective, and never raises."""
        if self._memory is None or step % self._memory_every:
            return
        try:
            self._memory.save(step, state(), loss)
        except (OSError, RuntimeError) as error:
            self._turn_memory_off(str(error))

    def _turn_memory_off(self, reason: str) -> None:
        """Training continues, and a restart resumes from disk."""
        self._memory = None
        self._on_memory_off(reason)

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
        """Wait for what is being written, and end the writer thread. The guard removes the
        snapshots at the end of the run."""
        self.wait()
        self._writer.shutdown()

    def resume(
        self, state: dict[str, Any], on_skipped: Callable[[Skipped], None] = lambda _s: None
    ) -> Path | None:
        """Load the newest usable checkpoint into `state`, in place, from memory or disk.

        Returns its path, or None if there is none. Skips damaged ones and reports each through
        `on_skipped` on rank 0. Raises CheckpointError if all are damaged: `state` may hold a part
        of one.
        """
        common = self._gather(self._memory.steps() if self._memory is not None else [])
        candidates = [(step, True) for step in set.intersection(*map(set, common))]
        # Rank 0's list on every rank: nodes may briefly see a network disk differently.
        candidates += [(step, False) for step in self._gather(list(complete_ones(self._folder)))[0]]
        skipped: list[Skipped] = []
        for step, in_memory in sorted(candidates, reverse=True):
            memory = self._memory if in_memory else None
            path = (self._folder if memory is None else memory.path) / _name(step)
            group, reason = self._group, None
            try:
                if memory is None:
                    load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
                else:
                    reason = memory.read(path, state)
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - after any failure, try another checkpoint; it is reported
                first = (str(error).splitlines() or [""])[0]
                reason = f"cannot be loaded: {type(error).__name__}: {first}"
            reason = next(filter(None, self._gather(reason)), None)
            if reason is None:
                return path
            skipped.append(Skipped(path, reason))
            if self._rank == 0:
                on_skipped(skipped[-1])
        if skipped:
            raise CheckpointError(
                f"no checkpoint can be resumed: {skipped[0].path} {skipped[0].reason}; to start "
                f"over, move {self._folder} away"
            )
        return None

    def _complete(self, written: Any, draft: Path, step: int, start: float) -> None:
        """`written`: the future of an asynchronous write, which completes when every rank's share
        and the common index are written, because torch gathers the results first."""
        if written is not None:
            written.result()
        if self._rank != 0:
            return
        size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        path = self._folder / _name(step)
        # A requested checkpoint may repeat a step that is saved already; the rename needs a free
        # name.
        outdated = [_withdrawn(path)] if path.exists() else []
        os.replace(draft, path)
        _fsync(self._folder)
        old_steps = sorted(complete_ones(self._folder))[: -self._keep]
        outdated += [_withdrawn(self._folder / _name(old)) for old in old_steps]
        for old in outdated:
            shutil.rmtree(old, ignore_errors=True)
        self._on_saved(Saved(path, step, size, time.monotonic() - start))

    def _gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Collective."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


class _Snapshots:
    """One rank's snapshots: `step-00000074/rank-0003.pt` in this node's memory."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self._rank = path, rank
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for draft in path.glob(f"step-*/{_DRAFT}{self._file(path).name}"):
            draft.unlink(missing_ok=True)

    def _file(self, folder: Path) -> Path:
        return folder / f"rank-{self._rank:04d}.pt"

    def steps(self) -> list[int]:
        """The steps that this rank has."""
        return [s for s in complete_ones(self.path) if self._file(self.path / _name(s)).exists()]

    def save(self, step: int, state: dict[str, Any], loss: float | None) -> None:
        if _flaw(state, loss, self._rank):
            return
        file = self._file(self.path / _name(step))
        file.parent.mkdir(exist_ok=True)
        draft = file.with_name(f"{_DRAFT}{file.name}")
        torch.save({"world_size": self._world_size, "parts": _parts(state)}, draft)
        os.replace(draft, file)
        for old in sorted(self.steps())[:-_SNAPSHOTS_KEPT]:
            outdated = self._file(self.path / _name(old))
            outdated.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                # Another rank of this node may still have its file there.
                outdated.parent.rmdir()

    def read(self, folder: Path, state: dict[str, Any]) -> str | None:
        """Load this rank's part into `state`; returns why it does not fit, None if it does. May
        raise anything."""
        document = torch.load(self._file(folder), weights_only=True, map_location="cpu")
        if document["world_size"] != self._world_size:
            return f"it is of {document['world_size']} ranks, and these are {self._world_size}"
        saved, current = document["parts"], _parts(state)
        if saved.keys() != current.keys():
            return f"it holds another state: {sorted(saved.keys() ^ current.keys())[0]}"
        for path, part in current.items():
            if isinstance(part, torch.Tensor) and saved[path].shape != part.shape:
                return f"{path} has another shape"
        for path, container, key in _leaves(state):
            if isinstance(current[path], torch.Tensor):
                current[path].copy_(saved[path])
            else:
                container[key] = saved[path]
        return None


def _name(step: int) -> str:
    return f"step-{step:08d}"


def complete_ones(folder: Path) -> Iterator[int]:
    """The steps of the complete checkpoints in a folder; none if it does not exist."""
    if folder.is_dir():
        for path in folder.iterdir():
            if (match := _NAME.fullmatch(path.name)) and path.is_dir():
                yield int(match[1])


def _leaves(container: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Everything in a state's nested dicts and lists: its path, and the container and key that hold
    it."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        where = f"{path}.{key}" if path else str(key)
        # A tuple of numbers, such as Adam's betas, is one value: it cannot be filled in place.
        nested = isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value)
        if nested or isinstance(value, (dict, list)):
            yield from _leaves(value, where)
        else:
            yield where, container, key


def _parts(state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of every tensor, and every other value, by path."""
    parts = ((path, container[key]) for path, container, key in _leaves(state))
    return {path: _shard(v) if isinstance(v, torch.Tensor) else v for path, v in parts}


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without its graph; shares the memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _flaw(state: dict[str, Any], loss: float | None, rank: int) -> str | None:
    """What is not finite on this rank; None if loss and tensors are."""
    if loss is not None and not math.isfinite(loss):
        return f"the loss is {loss} on rank {rank}"
    # One verdict a tensor, and one transfer a device: a transfer waits for the GPU.
    verdicts: dict[torch.device, dict[str, torch.Tensor]] = {}
    parts = _parts(state)
    for path, part in parts.items():
        if isinstance(part, torch.Tensor) and part.is_floating_point():
            verdicts.setdefault(part.device, {})[path] = torch.isfinite(part).all()
    for by_path in verdicts.values():
        finite = torch.stack([*by_path.values()]).tolist()
        for path, good in zip(by_path, finite, strict=True):
            if not good and not _is_mask(parts[path]):
                return f"{path} is not finite on rank {rank}"
    return None


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether the infinities are meant: an attention mask holds zeros and infinities only."""
    return bool(((tensor == 0) | torch.isinf(tensor)).all())


def _withdrawn(checkpoint: Path) -> Path:
    """Rename a checkpoint before it is removed, so that a crash midway leaves no partial folder
    with a valid name."""
    draft = checkpoint.with_name(f"{_DRAFT}old-{checkpoint.name}")
    shutil.rmtree(draft, ignore_errors=True)
    os.replace(checkpoint, draft)
    return draft


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
