"""Acceptance on one GPU: what was measured becomes a table and gpu-acceptance.json. Without a GPU
the same tests run on the CPU, and what needs the hardware says so in its row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import requires

OUT = Path(os.environ.get("OUT") or ".gpu")


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    what: str
    value: Any
    """None: it needs a GPU."""

    limit: str = ""


class Table:
    """The rows so far."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rows: list[Measured] = []

    def add(self, what: str, value: Any, limit: str = "") -> None:
        self.rows.append(Measured(what, value, limit))


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    requires.module("torch")
    import torch

    cuda = torch.cuda.is_available()
    made = Table(torch.cuda.get_device_name(0) if cuda else "CPU alone")
    yield made
    OUT.mkdir(parents=True, exist_ok=True)
    document = {
        "device": made.device,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in made.rows],
    }
    (OUT / "gpu-acceptance.json").write_text(json.dumps(document, indent=1))
    lines = [f"\n| {made.device}, torch {torch.__version__} | measured | limit |", "|---|---|---|"]
    for row in made.rows:
        value = "needs a GPU" if row.value is None else row.value
        lines.append(f"| {row.what} | {value} | {row.limit} |")
    print("\n".join(lines))


@pytest.fixture(scope="session")
def cuda(table: Table) -> bool:
    """A CUDA device is there."""
    import torch

    return torch.cuda.is_available()
