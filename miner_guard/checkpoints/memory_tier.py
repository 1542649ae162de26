"""The memory tier of checkpoints: keeps each rank's share of the state in /dev/shm for the next
launch.

A save first copies the state into this process's memory (`host_copy.py`). A thread then writes the
copy to the older of two slots, and finally renames a manifest into place. So one slot is always
complete, and a save interrupted by a crash has no manifest. The slots survive the processes but not
a reboot; checkpoints on disk survive both.

The slots are read and written as files and never mapped, because a rank that touches a mapped file
is killed by SIGBUS if something else has truncated the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import time
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from miner_guard.checkpoints.host_copy import HostCopy
from miner_guard.checkpoints.layout import Leaf, fill, parts, placed, tensor_over

_KEPT_FREE = 0.1
"""Fraction of free memory to leave to other processes."""

_CHUNK = 16 * 1024 * 1024

_ADVICE = (
    "call Checkpointer.settle() before anything other than an optimizer step changes parameters; "
    "from now on, training waits for the whole copy"
)


class NoRoom(Exception):
    """The state does not fit in free memory. The message says how much memory it needs."""


class Mixed(Exception):
    """A snapshot mixes two steps, because something changed a tensor during the copy."""


class MemoryTier:
    """One rank's slots. No method waits for other ranks."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """`folder` must be on a tmpfs on this node and private to this user. `optimizers`: their
        parameters and states are copied while training continues. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            raise PermissionError(f"{folder} belongs to another user")
        self._folder = folder
        self._name = f"rank-{rank:04d}"
        self._world_size = world_size
        self._copy = HostCopy(optimizers)
        """The state last saved, which the thread writes to a slot."""

        self._pending: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-memory")

    def save(self, step: int, state: dict[str, Any]) -> float:
        """Start saving `state`. Returns the seconds that training waited: in this call, and in
        optimizer steps since the previous call.

        Waits for the previous save if it is still running. Raises NoRoom, OSError, or what the
        previous save raised.
        """
        started, waited = time.monotonic(), self._copy.waited_s
        self._copy.waited_s = 0.0
        try:
            self.wait()
        except Mixed as mixed:
            self._copy.copy_at_once()
            warnings.warn(f"{mixed}; {_ADVICE}", RuntimeWarning, stacklevel=3)
        tensors, rest = parts(state)
        objects = io.BytesIO()
        torch.save(rest, objects)
        leaves = placed(tensors, objects.tell())
        slot = self._older_slot()
        # From here on the slot is incomplete.
        self._manifest(slot).unlink(missing_ok=True)
        size = leaves[-1].offset + leaves[-1].size if leaves else objects.tell()
        on_gpu = any(part.local.is_cuda for part in tensors.values())
        source = self._reserve(slot, max(size, 1), on_gpu=on_gpu)
        source[: objects.tell()] = objects.getvalue()
        manifest = {
            "step": step,
            "world_size": self._world_size,
            "objects": objects.tell(),
            "size": size,
            "leaves": [[e.name, e.dtype, list(e.shape), e.offset, e.size] for e in leaves],
        }
        self._copy.start([(leaf, tensors[leaf.name]) for leaf in leaves])
        try:
            self._pending = self._writer.submit(self._complete, slot, source, manifest)
        except RuntimeError:
            self._copy.cancel()
            raise
        return waited + time.monotonic() - started

    @property
    def waited_s(self) -> float:
        """Seconds that optimizer steps have waited for the last save's copy."""
        return self._copy.waited_s

    def settle(self) -> None:
        """Wait until the last save no longer needs the state's tensors."""
        self._copy.settle()

    def wait(self) -> None:
        """Wait until the previous save is complete. Raises what that save raised."""
        self.settle()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def whole(self) -> set[int]:
        """Return the steps of this rank's slots that are complete and have matching checksums."""
        return {int(m["step"]) for slot in (0, 1) if (m := self._verified(slot)) is not None}

    def unfit(self, step: int, state: dict[str, Any]) -> str | None:
        """Return why a step cannot be loaded into `state`; None if it can."""
        _, manifest = self._of(step)
        leaves = {leaf.name: leaf for leaf in _leaves(manifest)}
        tensors = {name: part.local for name, part in parts(state)[0].items()}
        if tensors.keys() != leaves.keys():
            return "its tensors differ from those of the model and optimizer"
        for name, tensor in tensors.items():
            if (tuple(tensor.shape), str(tensor.dtype)) != (leaves[name].shape, leaves[name].dtype):
                return f"{name} has a different shape or type"
        return None

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Load a step into `state`, in place. Call this only if `unfit` returned None for the step.
        Raises KeyError, OSError."""
        self.settle()
        slot, manifest = self._of(step)
        tensors, _ = parts(state)
        with open(self._data(slot), "rb") as file:
            objects = _read(file, 0, manifest["objects"])
            rest = torch.load(io.BytesIO(objects), weights_only=True)
            for leaf in _leaves(manifest):
                held = _read(file, leaf.offset, leaf.size)
                tensors[leaf.name].local.copy_(tensor_over(held, replace(leaf, offset=0)))
        fill(state, rest)

    def _of(self, step: int) -> tuple[int, dict[str, Any]]:
        for slot in (0, 1):
            manifest = self._read(slot)
            if manifest is not None and manifest["step"] == step:
                return slot, manifest
        raise KeyError(f"step {step} is not in memory")

    def close(self, *, remove: bool) -> None:
        """End the writer thread. `remove`: also delete the slots, if no launch will resume from
        them."""
        with contextlib.suppress(Exception):
            self.wait()
        self._writer.shutdown()
        self._copy.close()
        if remove:
            for slot in (0, 1):
                self._manifest(slot).unlink(missing_ok=True)
                self._data(slot).unlink(missing_ok=True)

    # slots

    def _data(self, slot: int) -> Path:
        return self._folder / f"{self._name}.{slot}.bin"

    def _manifest(self, slot: int) -> Path:
        return self._folder / f"{self._name}.{slot}.json"

    def _read(self, slot: int) -> dict[str, Any] | None:
        try:
            manifest: dict[str, Any] = json.loads(self._manifest(slot).read_text())
        except (OSError, ValueError):
            return None
        return manifest if manifest.get("world_size") == self._world_size else None

    def _verified(self, slot: int) -> dict[str, Any] | None:
        manifest = self._read(slot)
        if manifest is None:
            return None
        with contextlib.suppress(OSError), open(self._data(slot), "rb") as file:
            if _crc(file, manifest["size"]) == manifest["crc"]:
                return manifest
        return None

    def _older_slot(self) -> int:
        first, second = self._read(0), self._read(1)
        if first is None or second is None:
            return 0 if first is None else 1
        return 0 if first["step"] <= second["step"] else 1

    def _reserve(self, slot: int, size: int, *, on_gpu: bool) -> mmap.mmap:
        """Return memory for a copy of `size` bytes, after allocating the slot's file: if /dev/shm
        is full, the error must occur here, before the copy. Raises NoRoom, OSError."""
        path = self._data(slot)
        fits = path.exists() and path.stat().st_size == size
        if not fits:
            path.unlink(missing_ok=True)
        needed = size * ((self._copy.size != size) + (not fits))
        free = free_bytes(self._folder)
        if needed > free * (1 - _KEPT_FREE):
            raise NoRoom(
                f"a copy and a slot, {size / 2**30:.2f} GiB each, need another "
                f"{needed / 2**30:.2f} GiB of memory, but only {free / 2**30:.2f} GiB is free"
            )
        if not fits:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        return self._copy.resize(size, on_gpu=on_gpu)

    def _complete(self, slot: int, source: mmap.mmap, manifest: dict[str, Any]) -> None:
        """Finish the copy, write it to its slot, then write the manifest. Raises Mixed."""
        self._copy.finish()
        crc = 0
        with memoryview(source) as data, open(self._data(slot), "r+b", buffering=0) as file:
            for start in range(0, manifest["size"], _CHUNK):
                with data[start : min(start + _CHUNK, manifest["size"])] as chunk:
                    crc = zlib.crc32(chunk, crc)
                    _write(file, chunk)
        # Check last: torch counts a change only once it is complete, and one may have been in
        # progress when the copy ended.
        changed = self._copy.changed()
        if changed is not None:
            raise Mixed(f"the snapshot of step {manifest['step']} was discarded: {changed}")
        draft = self._manifest(slot).with_suffix(".tmp")
        draft.write_text(json.dumps({**manifest, "crc": crc}))
        os.replace(draft, self._manifest(slot))


def _write(file: io.FileIO, data: memoryview) -> None:
    """Write all of `data`. A single `write` call may write only part of it."""
    while data:
        data = data[file.write(data) :]


def _read(file: IO[bytes], start: int, size: int) -> bytearray:
    """Read `size` bytes at offset `start`. Raises OSError if the file is too short."""
    file.seek(start)
    data = bytearray(size)
    if file.readinto(data) != size:  # type: ignore[attr-defined]
        raise OSError(f"{file.name} is shorter than its manifest says")
    return data


def free_bytes(folder: Path) -> int:
    """Return how large, in bytes, a new file on `folder`'s tmpfs can be, given the tmpfs's limit
    and this machine's available memory."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free


def _leaves(manifest: dict[str, Any]) -> list[Leaf]:
    return [
        Leaf(name, dtype, tuple(shape), offset, size)
        for name, dtype, shape, offset, size in manifest["leaves"]
    ]


def _crc(file: IO[bytes], size: int) -> int | None:
    """Return the checksum of a file's first `size` bytes; None if the file is shorter."""
    value, left = 0, size
    while left:
        chunk = file.read(min(_CHUNK, left))
        if not chunk:
            return None
        value, left = zlib.crc32(chunk, value), left - len(chunk)
    return value
