"""Inspects a gradients file in a child with a deadline and limited memory, since the file is
untrusted.

Not for ranks: it starts a process and waits for it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from miner_guard.system import probe
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
    answer = probe.ask(
        "miner_guard.validators.inspect_gradients", request, deadline_s, python=python
    )
    if answer.known and isinstance(answer.value, dict):
        return answer.value
    size = path.stat().st_size if path.is_file() else None
    return {
        "size_bytes": size,
        "problems": [],
        "params": None,
        "reason": answer.reason or "the inspection returned no reason",
    }
