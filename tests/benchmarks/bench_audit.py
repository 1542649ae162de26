"""The audit: wall time and bytes fetched, against reading the same files and loading them in this
process."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from miner_guard.config import GateSettings, RepoSettings
from tests.benchmarks.frame import Row
from uploads import audit
from validators.facts import Network
from validators.limits import Limits
from validators.profiles import load_profile

TITLE = "Audit"
_PARAMETERS, _KEPT = 200, 40_000


def run() -> list[Row]:
    """A local repo with 100 MB of gradients in 200 parameters."""
    try:
        import torch
    except ImportError as error:
        return [Row("an audit", None, "s", note=f"torch is not installed: {error}")]
    limits = Limits.of(GateSettings(), {**load_profile("sn38").limits, "gradients_chunk": None})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "epoch-1").mkdir()
        gradients = {
            key: value
            for n in range(_PARAMETERS)
            for key, value in (
                (f"layer.{n}.idxs", torch.randint(0, 10**6, (_KEPT,))),
                (f"layer.{n}.vals", torch.randn(_KEPT)),
            )
        }
        path = root / "epoch-1" / "gradients.pt"
        torch.save({**gradients, "metadata": {"inner_step": 60}}, path)
        (root / "epoch-1" / "config.json").write_text(json.dumps({"block_list": [1000]}))
        metadata = {"run": "5", "outer_step": 1, "inner_step": 60, "peer_id": "x"}
        (root / "metadata.json").write_text(json.dumps(metadata))
        start = time.perf_counter()
        torch.load(path, weights_only=True)
        alone = time.perf_counter() - start
        network = Network(1100, 1, 300, None, True, 7, None, time.monotonic())
        report = audit.run(RepoSettings(kind="local", path=str(root)), limits, network)
        size = path.stat().st_size
    return [
        Row(
            "an audit of a local repo",
            report.seconds,
            "s",
            note=f"{report.outcome}; {alone:.2f} s to load the file alone",
        ),
        Row(
            "fetched / published bytes",
            report.fetched_bytes / size,
            "",
            "<= 1.01",
            f"{report.fetched_bytes} bytes",
        ),
    ]
