"""Acceptance on one GPU: the measurements become a table and gpu-acceptance.json. Without a GPU the
same tests run on the CPU under a fake NVML library, and rows that need the hardware say so."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import Guarded, guarding
from tests.gpu.machine import FAKE_GPU, Machine
from tests.support import requires
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library"]

OUT = Path(os.environ.get("OUT") or ".gpu")
LIMIT_S = 480.0


class Table:
    """The rows collected so far; the value of a check that needs a GPU is None without one."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, value: Any, limit: str = "") -> None:
        self.rows.append({"what": what, "value": value, "limit": limit})


@pytest.fixture(scope="session")
def cuda() -> bool:
    """Whether there is a CUDA device."""
    requires.module("torch")
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def table(cuda: bool) -> Iterator[Table]:
    import torch

    made, started = Table(torch.cuda.get_device_name(0) if cuda else "CPU alone"), time.monotonic()
    yield made
    seconds = time.monotonic() - started
    made.add("the whole acceptance", f"{seconds:.0f} s", f"<= {LIMIT_S:.0f} s")
    OUT.mkdir(parents=True, exist_ok=True)
    document = {
        "device": made.device,
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "rows": made.rows,
    }
    (OUT / "gpu-acceptance.json").write_text(json.dumps(document, indent=1))
    lines = [f"\n| {made.device}, torch {torch.__version__} | measured | limit |", "|---|---|---|"]
    for row in made.rows:
        value = "needs a GPU" if row["value"] is None else row["value"]
        lines.append(f"| {row['what']} | {value} | {row['limit']} |")
    print("\n".join(lines))


@pytest.fixture
def machine(cuda: bool, request: pytest.FixtureRequest) -> Machine:
    """The GPU, or a fake H200 for this test alone."""
    if cuda:
        return Machine(cuda, None)
    fake: FakeNvml = request.getfixturevalue("fake_nvml")
    fake.set(dict(FAKE_GPU))
    return Machine(cuda, fake)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A guard that has not been started yet; none of its processes outlives the test."""
    with guarding(tmp_path) as guard:
        yield guard
