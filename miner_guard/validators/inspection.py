"""Inspects a gradients file in a child with a deadline and limited memory, since the file is
untrusted.

`inspect_file` starts the child, `python -m miner_guard.validators.inspection`, which loads the file
as a validator does (`weights_only=True`: tensors and plain containers, no code), after it has
limited its memory and CPU time.
"""

from __future__ import annotations

import os
import resource
import sys
import zipfile
from pathlib import Path
from typing import Any

from miner_guard.system import probe
from miner_guard.validators.decoding import RejectedFile, applied, gist, load
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
    gradients = {k: v for k, v in vars(limits).items() if k.startswith("gradients_")}
    request = {
        "path": str(path),
        "shapes": None if shapes is None else dict(shapes.of),
        "optional": [] if shapes is None else sorted(shapes.optional),
        "limits": gradients,
        "memory_bytes": memory_bytes,
        "cpu_s": deadline_s,
    }
    answer = probe.ask("miner_guard.validators.inspection", request, deadline_s, python=python)
    if answer.reason is None and isinstance(answer.value, dict):
        return answer.value
    size = path.stat().st_size if path.is_file() else None
    reason = answer.reason or "the inspection returned no reason"
    return {"size_bytes": size, "problems": [], "params": None, "reason": reason}


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
    path, limits, shapes = request["path"], Limits(**request["limits"]), request["shapes"]
    try:
        size = os.stat(path).st_size
    except OSError as error:
        probe.reply(error=f"{path}: {error.strerror}")
        return
    if shapes is not None:
        shapes = Shapes(shapes, frozenset(request["optional"]))
    restrict(request["memory_bytes"] + 3 * size, request["cpu_s"])
    probe.reply(examine(torch, path, size, limits=limits, shapes=shapes))


def restrict(memory_bytes: int, cpu_s: float) -> None:
    """Permanently limit this process to `memory_bytes` beyond its current use, and to `cpu_s`."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def examine(
    torch: Any, path: str, size: int, *, limits: Limits, shapes: Shapes | None
) -> dict[str, Any]:
    """The report on a file of `size` bytes. Runs in a process that `restrict` has limited."""
    try:
        _check_size(path, size, limits.gradients_max_bytes)
        # Map the file, so that a parameter's values occupy memory only while in use; torch's older
        # format does not support mapping.
        with open(path, "rb") as file:
            mapped = file.read(4) == _ZIP
        document = load(torch, path, mmap=mapped)
        report = applied(torch, document, limits=limits, shapes=shapes, size=size)
        return {"size_bytes": size, **report}
    except RejectedFile as refusal:
        problem = str(refusal)
    except MemoryError:
        problem = f"needs more memory than is allowed for a file of {size} bytes"
    except Exception as error:  # noqa: BLE001 -- torch may raise anything on unusual tensors; reported as a problem
        # Reject rather than return `unknown`, which would let the upload pass: a file that fails
        # here fails in a validator too.
        problem = f"cannot be inspected: {type(error).__name__}: {gist(str(error))}"
    return {"size_bytes": size, "problems": [problem], "warnings": [], "params": 0}


def _check_size(path: str, size: int, max_bytes: int | None) -> None:
    if size == 0:
        raise RejectedFile("the file is empty")
    if max_bytes is not None and size > max_bytes:
        raise RejectedFile(f"{size} bytes, more than the plausible maximum of {max_bytes}")
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


if __name__ == "__main__":
    main()
