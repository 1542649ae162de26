"""Parameter shapes of the model being trained, for judging a gradients file. Standard library only.

Rank 0 writes them once, at `guard.diagnose`, into the state directory; the audit and `miner-guard
gate` read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.state_dir import read_json, write_atomic

MAX_PARAMETERS = 200_000
"""Do not store shapes for a model with more parameters than this: readers load the whole file."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Shapes:
    """A model's parameters by plain name."""

    of: Mapping[str, Sequence[int]]
    optional: frozenset[str] = field(default_factory=frozenset)
    """Parameters that a gradients file may omit: frozen ones and aliases of other parameters."""


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers of `torch.compile`, checkpointing, FSDP and DDP."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def write(path: Path, shapes: Shapes | None) -> None:
    """Replace the file; remove it if there are no shapes or too many parameters. Raises OSError."""
    if shapes is None or len(shapes.of) > MAX_PARAMETERS:
        path.unlink(missing_ok=True)
        return
    write_atomic(path, json.dumps({"shapes": dict(shapes.of), "optional": sorted(shapes.optional)}))


def read(path: Path) -> Shapes | None:
    """The shapes; None if no model was diagnosed here or the file is incomplete."""
    document = read_json(path)
    if not isinstance(document, Mapping):
        return None
    of, optional = document.get("shapes"), document.get("optional")
    if not isinstance(of, Mapping) or not all(_is_shape(shape) for shape in of.values()):
        return None
    return Shapes(of, frozenset(map(str, optional)) if isinstance(optional, list) else frozenset())


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(edge, int) for edge in value)
