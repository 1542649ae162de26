"""`python -m tests.benchmarks.audit [CLONE]`: the gate, and audits of gradients of 100 MB and 1 GB
by the rules and, in the environment of subnet 38's miner, by the functions of a clone.

The gradients keep every value of their model: no file of this size decodes to more. Memory is what
the processes own (`RssAnon`), without the pages of the mapped file; "beside the clone's own"
leaves out the clone's process.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from miner_guard.config import GateSettings, RepoSettings
from miner_guard.uploads import gate
from miner_guard.uploads.audit import Audit, AuditReport
from miner_guard.validators.facts import Candidate, Network, fingerprint
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.shapes import Shapes

LIMITS = load_profile("sn38").limits
CLONE = "miner_guard.validators.checkout"
MODELS = {"100 MB": (4096, 1024, 8), "1 GB": (16384, 2048, 25)}
"""Vocabulary, width and number of square layers."""


def main() -> None:
    """Print one row a figure."""
    seconds = decision_s()
    print(f"{'a decision of the gate':40} {seconds * 1e3:9.3f} ms  <= 1 ms")
    clone = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for size, (vocabulary, width, layers) in MODELS.items():
        named = [(f"layers.{n}.weight", (width, width)) for n in range(layers)]
        edges = ("embed.weight", (vocabulary, width)), ("head.weight", (vocabulary, width))
        shapes = Shapes(dict([edges[0], *named, edges[1]]))
        with tempfile.TemporaryDirectory() as folder:
            publish(Path(folder), shapes)
            for judge in (None, clone) if clone else (None,):
                report, taken_s, ours, theirs = watched(Path(folder), shapes, judge)
                how = "the clone" if judge else "the rules"
                print(
                    f"{f'an audit of {size} by {how}: {report.outcome}':40} {taken_s:9.1f} s, "
                    f"{ours:.0f} MB (<= 300), the clone's own {theirs:.0f} MB",
                    flush=True,
                )


def decision_s() -> float:
    """Median time of a decision on a complete candidate, inputs read from their file."""
    files = {"size_bytes": 10**8, "problems": [], "params": 300, "shapes_known": True}
    config = {"block_list": list(range(1000, 1100))}
    metadata = {"run": 5, "outer_step": 56, "inner_step": 84, "peer_id": "12D3"}
    candidate = Candidate(
        "gradient", 56, 84, 3.4, (3.4,) * 10, 56, files=files, config=config, metadata=metadata
    )
    settings = GateSettings()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gate-inputs.json"
        network = Network(1100, 56, 300, "128:0", True, 7, None, time.monotonic())
        known = gate.GateInputs(network=network, bucket="llama-4b-ws-4-007", limits=LIMITS)
        gate.write(path, known)

        def decide() -> None:
            now = time.monotonic()
            assert gate.decide(candidate, gate.read(path), settings, now=now, wall=now).verdicts

        return statistics.median(timeit.repeat(decide, number=1, repeat=1000))


def publish(root: Path, shapes: Shapes) -> None:
    """A revision whose gradients name every value."""
    document: dict[str, Any] = {"metadata": {"inner_step": 84}}
    for name, (rows, columns) in shapes.of.items():
        index = torch.arange(columns, dtype=torch.int16).expand(rows // 64, 64, columns)
        document[name + "idxs"] = index.contiguous()
        document[name + "vals"] = torch.randn(rows // 64, 64, columns) * 1e-3
    (root / "epoch-56").mkdir()
    torch.save(document, root / "epoch-56" / "gradients.pt")
    (root / "epoch-56" / "config.json").write_text('{"block_list": [1000]}')
    metadata = {"run": 5, "outer_step": 56, "inner_step": 84, "peer_id": "12D3"}
    (root / "metadata.json").write_text(json.dumps(metadata))


def watched(
    root: Path, shapes: Shapes, clone: Path | None
) -> tuple[AuditReport, float, float, float]:
    """The report, its seconds, and the most MB that our processes owned beyond this one before the
    audit, and the clone's."""
    limits, keys = Limits.of(GateSettings(), LIMITS), "k" * 128
    network = Network(1100, 56, 300, fingerprint(keys), True, 7, None, time.monotonic())
    repo = RepoSettings(kind="local", path=str(root), bucket="llama-4b-ws-4-007")
    audit = Audit(repo, limits, network, keys, model=shapes, checkout=clone)
    before, peaks, ended = sum(owned(this=True)), [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peaks[0] = max(peaks[0], sum(owned(this=True)) - before)
            peaks[1] = max(peaks[1], sum(owned(this=False)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    report = audit.report()
    taken_s = time.perf_counter() - start
    ended.set()
    watcher.join()
    return report, taken_s, *peaks


def owned(*, this: bool) -> Iterator[float]:
    """MB that this process and its children own; or, not `this`, those of the clone."""
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError, StopIteration):
            if (CLONE in process.cmdline()) is not this:
                text = Path(f"/proc/{process.pid}/status").read_text()
                line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
                yield int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
