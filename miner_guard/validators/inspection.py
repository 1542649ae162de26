"""Inspects a gradients file in a child with a deadline and limited memory, since the file is
untrusted.

`inspect_file` starts the child, `python -m miner_guard.validators.inspection`, which loads the file
as a validator does (`weights_only=True`: tensors and plain containers, no code), after it has
limited its memory and CPU time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import resource
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from miner_guard.system import probe
from miner_guard.validators.decoding import RejectedFile, applied, gist
from miner_guard.validators.limits import Limits
from miner_guard.validators.shapes import Shapes

DEADLINE_S = 120.0


MEMORY_BYTES = 2 * 1024**3
"""Memory for the child beyond torch itself and three times the file (the file, its tensors, a
mask)."""


def inspect_file(
    path: Path,
    limits: Limits,
    *,
    shapes: Shapes | None = None,
    deadline_s: float = DEADLINE_S,
    memory_bytes: int = MEMORY_BYTES,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Inspect `path`: returns `size_bytes`, `params`, and `problems` in words (empty if it has no
    problems).

    `shapes` are the model's; `shapes_known` says whether they were compared with the file. If the
    inspection is inconclusive, `reason` says why. Never raises.
    """
    request = {
        "path": str(path),
        "shapes": None
        if shapes is None
        else {name: list(shape) for name, shape in shapes.of.items()},
        "optional": [] if shapes is None else sorted(shapes.optional),
        "limits": {
            k: v for k, v in dataclasses.asdict(limits).items() if k.startswith("gradients_")
        },
        "memory_bytes": memory_bytes,
        "cpu_s": deadline_s,
    }
    answer = probe.ask("miner_guard.validators.inspection", request, deadline_s, python=python)
    if answer.known and isinstance(answer.value, dict):
        return answer.value
    size = path.stat().st_size if path.is_file() else None
    return {
        "size_bytes": size,
        "problems": [],
        "params": None,
        "reason": answer.reason or "the inspection returned no reason",
    }


# in the child

_ZIP = b"PK\x03\x04"


def main() -> None:
    """Write the report that `inspect_file` describes."""
    request = probe.request()
    try:
        import torch
    except ImportError as error:
        probe.reply(error=f"torch cannot be imported ({error}); validators load the file with it")
        return
    torch.set_num_threads(1)
    path, limits = request["path"], Limits(**request["limits"])
    try:
        size = os.stat(path).st_size
    except OSError as error:
        probe.reply(error=f"{path}: {error.strerror}")
        return
    shapes = (
        None
        if request["shapes"] is None
        else Shapes(request["shapes"], frozenset(request["optional"]))
    )
    probe.reply(
        examine(
            torch,
            path,
            size,
            limits=limits,
            shapes=shapes,
            memory_bytes=request["memory_bytes"],
            cpu_s=request["cpu_s"],
        )
    )


def examine(
    torch: Any,
    path: str,
    size: int,
    *,
    limits: Limits,
    shapes: Shapes | None,
    memory_bytes: int | None,
    cpu_s: float,
) -> dict[str, Any]:
    """The report on a file of `size` bytes. Permanently limits this process to `memory_bytes`
    beyond its current use."""
    report: dict[str, Any] = {"size_bytes": size, "problems": [], "warnings": [], "params": 0}
    try:
        _check_size(size, limits.gradients_max_bytes)
        if memory_bytes is not None:
            _restrict(memory_bytes + 3 * size, cpu_s)
        _check_claims(path, size)
        return {
            **report,
            **applied(
                torch,
                _load(torch, path),
                limits=limits,
                shapes=shapes,
                size=size,
                each=MappedFile(path).released_after_each,
            ),
        }
    except RejectedFile as refusal:
        problem = str(refusal)
    except MemoryError:
        problem = f"needs more memory than is allowed for a file of {size} bytes"
    except Exception as error:  # noqa: BLE001 -- torch may raise anything on unusual tensors; reported as a problem
        # Reject rather than return `unknown`, which would let the upload pass: a file that fails
        # here fails in a validator too.
        problem = f"cannot be inspected: {type(error).__name__}: {gist(str(error))}"
    return {**report, "problems": [problem]}


def _check_size(size: int, max_bytes: int | None) -> None:
    if size == 0:
        raise RejectedFile("the file is empty")
    if max_bytes is not None and size > max_bytes:
        raise RejectedFile(f"{size} bytes, more than the plausible maximum of {max_bytes}")


def _check_claims(path: str, size: int) -> None:
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise RejectedFile(f"truncated or damaged: {error}") from error
    # torch stores without compression, so contents larger than the file indicate a zip bomb or a
    # forged header.
    if claimed > size:
        raise RejectedFile(f"claims {claimed} bytes of contents, but the file has only {size}")


def _restrict(memory_bytes: int, cpu_s: float) -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(torch: Any, path: str) -> Any:
    try:
        # Map the file, so that a parameter's values occupy memory only while in use; torch's older
        # format does not support mapping.
        with open(path, "rb") as file:
            mapped = file.read(4) == _ZIP
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except Exception as error:
        # A hostile file may raise any exception; every one means rejection.
        words = gist(str(error))
        if "alloc" in words or "memory" in words.lower():
            raise RejectedFile(f"needs more memory than allowed: {words}") from error
        raise RejectedFile(
            f"does not load with weights_only=True: {type(error).__name__}: {words}"
        ) from error
    return document


class MappedFile:
    """The pages of a mapped file that this process has read, released on request.

    torch maps the file privately and decoding changes nothing in place, so a released page is read
    again when it is needed. Without this, all of a 1 GB file counts as this child's memory.
    """

    def __init__(self, path: str) -> None:
        mapped = f" {os.path.realpath(path)}\n"
        with open("/proc/self/maps") as file:
            lines = [line.split() for line in file if line.endswith(mapped)]
        bounds = [[int(edge, 16) for edge in fields[0].split("-")] for fields in lines]
        self._ranges = [(first, last - first) for first, last in bounds]
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def released_after_each(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names, and release the pages read for each before the next."""
        for name in names:
            yield name
            self.release()

    def release(self) -> None:
        """Drop the pages from this process's memory."""
        for start, length in self._ranges:
            self._madvise(start, length, mmap.MADV_DONTNEED)


if __name__ == "__main__":
    main()
