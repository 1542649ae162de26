"""The audit's wall time, bytes fetched and memory, compared with loading the same file in this
process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from miner_guard.config import GateSettings, RepoSettings
from miner_guard.uploads import audit
from miner_guard.validators.facts import Network
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from tests.benchmarks.frame import Row

TITLE = "Audit"
SIZES_MB = [int(size) for size in os.environ.get("BENCH_AUDIT_MB", "100 1000").split()]
_PARAMETERS, _TOPK = 200, 32
_VALUE_BYTES = 12
"""Bytes per entry: an int64 index and a float32 value."""


def run() -> list[Row]:
    """Local repos with 100 MB and 1 GB of gradients (BENCH_AUDIT_MB) in 200 parameters."""
    try:
        import torch
    except ImportError as error:
        return [Row("an audit", None, "s", note=f"torch is not installed: {error}")]
    return [row for size_mb in SIZES_MB for row in _rows(torch, size_mb)]


def _rows(torch: Any, size_mb: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = _published(torch, Path(folder), size_mb)
        start = time.perf_counter()
        torch.load(path, weights_only=True)
        alone = time.perf_counter() - start
        # In a separate process, because a child's memory includes what its parent held at the fork.
        command = [sys.executable, "-m", __name__, folder]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        seen, size = json.loads(printed), path.stat().st_size
    fetched = seen["fetched_bytes"]
    return [
        Row(
            f"an audit of {size_mb} MB in a local repo",
            seen["seconds"],
            "s",
            note=f"{seen['outcome']}; {alone:.2f} s to load the file alone",
        ),
        Row("fetched / published bytes", fetched / size, "", "<= 1.01", f"{fetched} bytes"),
        Row(
            "memory of its largest child",
            seen["peak_mib"],
            "MiB",
            "<= 300",
            "about 220 are torch's; the file is mapped, and pages are given back once read",
        ),
    ]


def _published(torch: Any, root: Path, size_mb: int) -> Path:
    rows = size_mb * 1_000_000 // (_PARAMETERS * _TOPK * _VALUE_BYTES)
    gradients = {
        key: value
        for n in range(_PARAMETERS)
        for key, value in (
            (f"layer.{n}.idxs", torch.randint(0, 64, (rows, _TOPK))),
            (f"layer.{n}.vals", torch.randn(rows, _TOPK)),
        )
    }
    path = root / "epoch-1" / "gradients.pt"
    path.parent.mkdir()
    torch.save({**gradients, "metadata": {"inner_step": 60}}, path)
    (root / "epoch-1" / "config.json").write_text(json.dumps({"block_list": [1000]}))
    metadata = {"run": "5", "outer_step": 1, "inner_step": 60, "peer_id": "x"}
    (root / "metadata.json").write_text(json.dumps(metadata))
    return path


def main() -> None:
    """Audit the repo in the folder given on the command line; print the cost as JSON."""
    limits = Limits.of(GateSettings(), load_profile("sn38").limits)
    network = Network(1100, 1, 300, None, True, 7, None, time.monotonic())
    report = audit.run(RepoSettings(kind="local", path=sys.argv[1]), limits, network)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    seen = {name: getattr(report, name) for name in ("outcome", "seconds", "fetched_bytes")}
    print(json.dumps({**seen, "peak_mib": peak_kib / 1024}))


if __name__ == "__main__":
    main()
