"""Publishes a gradient and audits it, with the inspection in this process."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import GateSettings, RepoSettings
from miner_guard.uploads import audit
from miner_guard.validators.facts import Network
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from tests.support.gradient_files import inspect_here

torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")


FLAT = Limits.of(
    GateSettings(), {**load_profile("sn38").limits, "gradients_chunk": None, "commitment_form": []}
)
"""A folder has no keys to commit."""


@pytest.fixture
def inspected_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspects files without starting a child, which has its own tests."""
    monkeypatch.setattr(audit, "inspect_file", inspect_here)


def publish(
    root: Path,
    outer: int = 56,
    inner: int = 84,
    age_s: float = 0.0,
    blocks: Any = (1000,),
    **change: Any,
) -> None:
    folder = root / f"epoch-{outer}"
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "widxs": torch.tensor([1, 2]),
        "wvals": torch.tensor([0.5, -0.5]),
        "metadata": {"inner_step": inner},
    }
    torch.save({**values, **change}, folder / "gradients.pt")
    (folder / "config.json").write_text(json.dumps({"block_list": list(blocks)}))
    metadata = {"run": "5", "outer_step": outer, "inner_step": inner, "peer_id": "12D3"}
    (root / "metadata.json").write_text(json.dumps(metadata))
    then = time.time() - age_s
    os.utime(folder / "gradients.pt", (then, then))


def ages_to_the_hundred(words: str) -> str:
    """Replace `2101s old` by `2100s old`: on a busy machine seconds pass between publishing and the
    audit."""
    return re.sub(r"\b(\d+)\d\ds old", r"\g<1>00s old", words)


def chain(outer_step: int | None = 56, since: int | None = 300, block: int = 1100) -> Network:
    return Network(block, outer_step, since, None, True, 7, None, time.monotonic())


def look(
    root: Path, network: Network | None = None, limits: Limits = FLAT, **repo: Any
) -> audit.AuditReport:
    where = RepoSettings(kind="local", path=str(root), **repo)
    return audit.Audit(where, limits, network or chain()).report()
