"""The memory tier of checkpoints: keeps each rank's share of the state in /dev/shm for the next
launch.

A save first copies the state into memory of this process (on a GPU with a dedicated stream). A
thread then writes the copy to the older of two slots, and last renames a manifest into place. So
one slot is complete at any moment, and a save that a crash interrupts has no manifest. The slots
survive the processes but not a reboot; checkpoints on disk do.

The slots are read and written as files and never mapped, because a rank that touches a mapped file
dies of SIGBUS if something else has truncated the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.tensor import DTensor

_ALIGNMENT = 64
_KEPT_FREE = 0.1
"""Share of the free memory to leave for others."""

_CHUNK = 16 * 1024 * 1024


class NoRoom(Exception):
    """The state does not fit into the free memory. The message says how much memory it needs."""


@dataclass(frozen=True)
class _Leaf:
    """Where a tensor's bytes are in a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class MemoryTier:
    """One rank's slots. No method waits for other ranks."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """`folder` must be on a tmpfs of this node and private to this user. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            raise PermissionError(f"{folder} belongs to another user")
        self._folder = folder
        self._name = f"rank-{rank:04d}"
        self._world_size = world_size
        self._copied: mmap.mmap | None = None
        """Anonymous memory with the state of the last save, from which the thread writes a slot."""

        self._pending: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-memory")
        self._stream: Any = None

    def save(self, step: int, state: dict[str, Any]) -> float:
        """Start saving `state`; returns the seconds that training waited.

        Waits for the previous save if it is still running. Raises NoRoom, OSError, or what the
        previous save raised.
        """
        self.wait()
        started = time.monotonic()
        tensors, rest = _parts(state)
        objects = io.BytesIO()
        torch.save(rest, objects)
        leaves = _placed(tensors, objects.tell())
        slot = self._older_slot()
        # From here on the slot is incomplete.
        self._manifest(slot).unlink(missing_ok=True)
        size = leaves[-1].offset + leaves[-1].size if leaves else objects.tell()
        target = self._reserve(slot, size)
        target[: objects.tell()] = objects.getvalue()
        done = self._copy(target, [(leaf, tensors[leaf.name]) for leaf in leaves])
        manifest = {
            "step": step,
            "world_size": self._world_size,
            "objects": objects.tell(),
            "size": size,
            "leaves": [[e.name, e.dtype, list(e.shape), e.offset, e.size] for e in leaves],
        }
        self._pending = self._writer.submit(self._complete, slot, target, manifest, done)
        return time.monotonic() - started

    def wait(self) -> None:
        """Wait until the previous save is complete. Raises what that save raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def whole(self) -> set[int]:
        """The steps that this rank's slots hold completely, with matching checksums."""
        return {int(m["step"]) for slot in (0, 1) if (m := self._verified(slot)) is not None}

    def unfit(self, step: int, state: dict[str, Any]) -> str | None:
        """Why a step cannot be loaded into `state`; None if it can."""
        _, manifest = self._of(step)
        leaves = {leaf.name: leaf for leaf in _leaves(manifest)}
        tensors, _ = _parts(state)
        if tensors.keys() != leaves.keys():
            return "its tensors differ from those of the model and optimizer"
        for name, tensor in tensors.items():
            if (tuple(tensor.shape), str(tensor.dtype)) != (leaves[name].shape, leaves[name].dtype):
                return f"{name} has changed its shape or type"
        return None

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Load a step for which `unfit` returns None into `state`, in place. Raises KeyError,
        OSError."""
        slot, manifest = self._of(step)
        tensors, _ = _parts(state)
        with open(self._data(slot), "rb") as file:
            objects = _read(file, 0, manifest["objects"])
            rest = torch.load(io.BytesIO(objects), weights_only=True)
            for leaf in _leaves(manifest):
                held = _read(file, leaf.offset, leaf.size)
                tensors[leaf.name].copy_(_over(held, replace(leaf, offset=0)))
        _fill(state, rest)

    def _of(self, step: int) -> tuple[int, dict[str, Any]]:
        for slot in (0, 1):
            manifest = self._read(slot)
            if manifest is not None and manifest["step"] == step:
                return slot, manifest
        raise KeyError(f"step {step} is not in memory")

    def close(self, *, remove: bool) -> None:
        """End the writer thread. `remove`: also delete the slots, because no launch will resume
        from them."""
        with contextlib.suppress(Exception):
            self.wait()
        self._writer.shutdown()
        # A tensor on this memory may still exist; Python frees the memory with the last of them.
        self._copied = None
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

    def _reserve(self, slot: int, size: int) -> mmap.mmap:
        """Return memory for a copy of `size` bytes, after allocating the slot's file: if /dev/shm
        is full, the error must occur here, before the copy. Raises NoRoom, OSError."""
        path = self._data(slot)
        if self._copied is not None and len(self._copied) != max(size, 1):
            self._copied = None
        fits = path.exists() and path.stat().st_size == size
        if not fits:
            path.unlink(missing_ok=True)
        needed = size * ((self._copied is None) + (not fits))
        free = free_bytes(self._folder)
        if needed > free * (1 - _KEPT_FREE):
            raise NoRoom(
                f"a copy and a slot of {size / 2**30:.2f} GiB each need {needed / 2**30:.2f} GiB "
                f"of memory, {free / 2**30:.2f} GiB are free"
            )
        if not fits:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, max(size, 1))
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        if self._copied is None:
            self._copied = mmap.mmap(-1, max(size, 1))
        return self._copied

    def _copy(self, target: mmap.mmap, leaves: list[tuple[_Leaf, torch.Tensor]]) -> Any:
        """Start copying all tensors. Returns the CUDA event that signals completion; None without a
        GPU, where the copy is complete."""
        on_gpu = any(tensor.is_cuda for _, tensor in leaves)
        if not on_gpu:
            for leaf, tensor in leaves:
                _over(target, leaf).copy_(tensor)
            return None
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for leaf, tensor in leaves:
                _over(target, leaf).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
        # Make the GPU wait, not the CPU: the next step must not overwrite tensors that are still
        # being copied.
        current.wait_stream(self._stream)
        return self._stream.record_event()

    def _complete(self, slot: int, source: mmap.mmap, manifest: dict[str, Any], done: Any) -> None:
        """Write the copied state to its slot, then the manifest. `done`: the CUDA event that the
        copy is complete, or None."""
        if done is not None:
            done.synchronize()
        crc = 0
        with memoryview(source) as data, open(self._data(slot), "r+b", buffering=0) as file:
            for start in range(0, manifest["size"], _CHUNK):
                with data[start : min(start + _CHUNK, manifest["size"])] as chunk:
                    crc = zlib.crc32(chunk, crc)
                    _write(file, chunk)
        draft = self._manifest(slot).with_suffix(".tmp")
        draft.write_text(json.dumps({**manifest, "crc": crc}))
        os.replace(draft, self._manifest(slot))


def _write(file: io.FileIO, data: memoryview) -> None:
    """Write all of `data`. It loops, because one call may write less."""
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
    """How many bytes a file on `folder`'s tmpfs may take, given the limit of the tmpfs and this
    machine's available memory."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free


def _local(value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, detached from its graph."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _walk(each, f"{path}/{index}")
    else:
        yield path, value


def _parts(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a state into this rank's tensors and all other values, each by path."""
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {}
    for path, value in _walk(state):
        if isinstance(value, torch.Tensor):
            tensors[path] = _local(value)
        else:
            rest[path] = value
    return tensors, rest


def _placed(tensors: dict[str, torch.Tensor], offset: int) -> list[_Leaf]:
    leaves = []
    for name, tensor in tensors.items():
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        size = tensor.numel() * tensor.element_size()
        leaves.append(_Leaf(name, str(tensor.dtype), tuple(tensor.shape), offset, size))
        offset += size
    return leaves


def _over(data: Any, leaf: _Leaf) -> torch.Tensor:
    """A tensor that shares the leaf's bytes in `data`."""
    dtype = getattr(torch, leaf.dtype.removeprefix("torch."))
    if not leaf.size:
        return torch.empty(leaf.shape, dtype=dtype)
    count = leaf.size // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=leaf.offset)
    return flat.view(leaf.shape)


def _leaves(manifest: dict[str, Any]) -> list[_Leaf]:
    return [
        _Leaf(name, dtype, tuple(shape), offset, size)
        for name, dtype, shape, offset, size in manifest["leaves"]
    ]


def _fill(value: Any, rest: dict[str, Any], path: str = "") -> None:
    """Put the values in `rest`, which are not tensors, back into `value`, in place."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(items):
        where = f"{path}/{key}"
        if isinstance(each, (dict, list)):
            _fill(each, rest, where)
        elif where in rest:
            value[key] = rest[where]


def _crc(file: IO[bytes], size: int) -> int | None:
    """The checksum of the first `size` bytes of a file; None if the file is shorter."""
    value, left = 0, size
    while left:
        chunk = file.read(min(_CHUNK, left))
        if not chunk:
            return None
        value, left = zlib.crc32(chunk, value), left - len(chunk)
    return value
