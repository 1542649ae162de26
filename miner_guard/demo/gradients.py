"""Writes the demo's pseudo-gradient to the files that subnet 38's validators read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miner_guard.demo.outer import OuterOptimizer

KEPT_RATIO = 0.02
"""Share of each tensor's entries to upload; the demo picks those with the largest magnitude."""

BLOCK_S = 12
"""The chain's block time in seconds. The demo has no chain: it counts blocks of this length since
1970."""


def block_now() -> int:
    """The demo's current block number."""
    return int(time.time()) // BLOCK_S


def sparse_gradients(model: nn.Module, outer: OuterOptimizer, rank: int) -> dict[str, Tensor]:
    """The pseudo-gradient in sparse form: `<param>idxs` (int64, indices into the flattened tensor)
    and `<param>vals` (float32) on rank 0; empty on other ranks.

    Collective: gathers one parameter at a time, so that no rank holds a second copy of the model.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = outer.pseudo_gradient(name, parameter)
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if rank != 0:
            continue
        flat = whole.flatten().float().cpu()
        kept = flat.abs().topk(max(1, int(flat.numel() * KEPT_RATIO))).indices.sort().values
        found[f"{name}idxs"] = kept
        found[f"{name}vals"] = flat[kept]
    return found


def write_upload(
    folder: Path,
    gradients: Mapping[str, Tensor],
    shape: Mapping[str, Any],
    *,
    blocks: Iterable[int],
    metadata: Mapping[str, Any],
) -> None:
    """Write `gradients.pt`, `config.json`, `metadata.json` into an empty or new `folder`. Raises
    OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**gradients, "metadata": dict(metadata)}, folder / "gradients.pt")
    (folder / "config.json").write_text(json.dumps({**shape, "block_list": list(blocks)}))
    (folder / "metadata.json").write_text(json.dumps(metadata))
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
