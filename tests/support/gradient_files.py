"""Gradients files for the tests of the gradients inspection, and a way to run that inspection in
this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miner_guard.validators.inspection import examine
from miner_guard.validators.limits import Limits
from miner_guard.validators.shapes import Shapes

torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")


FLAT = Limits(gradients_metadata_key="metadata", gradients_scale=0.35, gradients_max_bytes=10**9)


SHAPES = Shapes({"w": (8, 16), "b": (10,)})


def good() -> dict[str, Any]:
    return {
        "widxs": torch.tensor([0, 5, 127]),
        "wvals": torch.tensor([0.5, -1.0, 2.0]),
        "bidxs": torch.tensor([9]),
        "bvals": torch.tensor([0.25]),
        "metadata": {"outer_step": 56, "inner_step": 84, "loss": 3.4},
    }


def saved(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "gradients.pt"
    torch.save(document, path)
    return path


def inspect_here(
    path: Path, limits: Limits = FLAT, *, shapes: Shapes | None = None
) -> dict[str, Any]:
    """What `inspect_file` reports, in this process: a child would import torch again. For files
    that are merely wrong, not hostile."""
    return examine(torch, str(path), path.stat().st_size, limits=limits, shapes=shapes)
