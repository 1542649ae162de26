"""Copies a state into this process's memory while training continues.

Parameters and optimizer states change only in an optimizer step, so they can be copied during the
next forward and backward pass. If the copy takes longer, the next optimizer step waits for it.
Everything else is copied before training continues: buffers such as BatchNorm's, which a forward
pass changes, and the RNG states.

If something else changes a parameter in the meantime, the copy mixes two steps. torch counts most
changes to a tensor (not those through `.data`); if a tensor has changed, the copy is discarded.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from miner_guard.checkpoints.layout import Leaf, Part, local_part, tensor_over

_Tensors = list[tuple[Leaf, torch.Tensor]]
"""Each tensor's place in the copy, and this rank's shard of it."""

_PATIENCE_S = 60.0
"""How long an optimizer step waits for a copy before discarding it. Copying takes about a second
per 5 GB."""


class HostCopy:
    """Holds the memory for one copy at a time. Only `finish` runs in another thread."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """`optimizers`: if their step calls torch's hooks, their parameters and states are copied
        while training continues."""
        self._optimizers = tuple(each for one in optimizers if (each := _hooked(one)) is not None)
        self._hook: Any = None
        if self._optimizers:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._memory: mmap.mmap | None = None
        self._pinned: int | None = None
        self._stream: Any = None
        self._copied: Any = None
        """The CUDA event of the last copy; None without a GPU."""

        self._later: _Tensors = []
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._moved = threading.Event()
        self._moved.set()
        self._settled = True
        self._changed: str | None = None
        self._mutex = threading.Lock()
        self.waited_s = 0.0
        """Seconds that optimizer steps have waited for copies."""

    @property
    def size(self) -> int:
        """Size of the memory in bytes; 0 if there is none."""
        return 0 if self._memory is None else len(self._memory)

    def resize(self, size: int, *, on_gpu: bool) -> mmap.mmap:
        """Resize the memory to `size` bytes and return it. Raises OSError."""
        if self._memory is None or len(self._memory) != size:
            self._release()
            self._memory = mmap.mmap(-1, size)
            if on_gpu:
                self._pin(self._memory)
        return self._memory

    def _pin(self, memory: mmap.mmap) -> None:
        """Let the GPU write into the memory directly, so that training does not wait for it."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        with contextlib.suppress(RuntimeError, AttributeError):
            if int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)) == 0:  # type: ignore[no-untyped-call]
                self._pinned = address

    def _release(self) -> None:
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = None
        # Tensors may still use this memory; Python frees it with the last of them.
        self._memory = None

    @torch.no_grad()
    def start(self, tensors: Sequence[tuple[Leaf, Part]]) -> None:
        """Copy everything that may change before the next optimizer step, and prepare the rest for
        `finish`, which must then run in another thread."""
        assert self._memory is not None
        steady = self._steady()
        at_once: _Tensors = []
        later: _Tensors = []
        self._versions = []
        for leaf, part in tensors:
            if _storage(part.local) in steady:
                later.append((leaf, part.local))
                # A DTensor counts its changes; its shard does not.
                self._versions.append((leaf.name, part.value, part.value._version))
            else:
                at_once.append((leaf, part.local))
        self._settled, self._changed, self._copied = False, None, None
        if any(part.local.is_cuda for _, part in tensors):
            self._start_on_gpu(at_once, later)
        for leaf, tensor in at_once:
            if not tensor.is_cuda:
                tensor_over(self._memory, leaf).copy_(tensor)
        self._later = [(leaf, tensor) for leaf, tensor in later if not tensor.is_cuda]
        self._moved.clear()

    def _start_on_gpu(self, at_once: _Tensors, later: _Tensors) -> None:
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        self._enqueue(at_once)
        # Make the GPU wait, not the CPU: the forward pass must not overwrite these tensors while
        # they are being copied.
        current.wait_stream(self._stream)
        self._enqueue(later)
        self._copied = self._stream.record_event()

    def _enqueue(self, tensors: _Tensors) -> None:
        with torch.cuda.stream(self._stream):
            for leaf, tensor in tensors:
                if tensor.is_cuda:
                    tensor_over(self._memory, leaf).copy_(tensor, non_blocking=True)
                    tensor.record_stream(self._stream)

    def _steady(self) -> set[int | None]:
        """Return the storages that only these optimizers' steps change."""
        found: set[int | None] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(_storage(local_part(each)) for each in group["params"])
            for state in optimizer.state.values():
                found.update(
                    _storage(local_part(each))
                    for each in state.values()
                    if isinstance(each, torch.Tensor)
                )
        return found - {None}

    def finish(self) -> None:
        """Copy the rest. Call it in another thread, once per `start`."""
        try:
            if self._later:
                assert self._memory is not None
                base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
                for leaf, tensor in self._later:
                    self._move(base, leaf, tensor)
        finally:
            self._later = []
            self._moved.set()
        if self._copied is not None:
            self._copied.synchronize()

    def _move(self, base: int, leaf: Leaf, tensor: torch.Tensor) -> None:
        if tensor.is_contiguous():
            # One thread, without the GIL: `copy_` would start a second team of torch's threads,
            # which take the cores from the forward pass.
            ctypes.memmove(base + leaf.offset, tensor.data_ptr(), leaf.size)
        else:
            assert self._memory is not None
            tensor_over(self._memory, leaf).copy_(tensor)

    def _before_step(self, *_: object) -> None:
        if not self._settled:
            started = time.monotonic()
            self.settle()
            self.waited_s += time.monotonic() - started

    def settle(self) -> None:
        """Wait until the copy no longer needs the tensors. Call this before changing them outside
        an optimizer step."""
        if self._settled:
            return
        if not self._moved.wait(_PATIENCE_S):
            self._conclude(f"the copy took more than {_PATIENCE_S:g} s")
        self._conclude(self._changed_tensor())
        if self._copied is not None:
            # The GPU waits, not the CPU.
            torch.cuda.current_stream().wait_event(self._copied)

    def changed(self) -> str | None:
        """Return why the copy mixes two steps; None if it is intact. Call this after `finish`."""
        self._conclude(self._changed_tensor())
        return self._changed

    def _changed_tensor(self) -> str | None:
        for name, tensor, version in self._versions:
            if tensor._version != version:
                return f"{name} changed while it was being copied"
        return None

    def _conclude(self, changed: str | None) -> None:
        """Store the first result. Later ones do not count: tensors may change after `settle`."""
        with self._mutex:
            if not self._settled:
                self._settled, self._changed, self._versions = True, changed, []

    def cancel(self) -> None:
        """Discard the copy that `start` prepared. Call this if no thread can finish it."""
        self._later, self._versions, self._settled = [], [], True
        self._moved.set()

    def copy_at_once(self) -> None:
        """Switch to copying everything before training continues."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._optimizers = None, ()

    def close(self) -> None:
        """Release the memory; optimizers no longer wait."""
        self.copy_at_once()
        self._release()


def _hooked(optimizer: Any) -> Any | None:
    """Unwrap an optimizer until its step calls torch's hooks; accelerate's wrapper, for example,
    calls none. Returns None if no step calls them, because then no step would wait for a copy."""
    while optimizer is not None and not getattr(type(optimizer).step, "hooked", False):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def _storage(tensor: torch.Tensor) -> int | None:
    """Return a tensor's memory address; None if it has none or torch does not count its changes."""
    if tensor.is_inference() or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        # Some subclasses have no storage.
        return None
