"""The cost of one gate decision in rank 0, without the broadcast."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from miner_guard.config import GateSettings
from miner_guard.uploads import gate
from miner_guard.uploads import inputs as gate_inputs
from miner_guard.uploads.inputs import GateInputs
from miner_guard.validators.decoding import contents
from miner_guard.validators.facts import Candidate, Network, Published
from miner_guard.validators.limits import Limits
from miner_guard.validators.outline import outline
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.shapes import Shapes
from tests.benchmarks.frame import Row, per_call

TITLE = "Gate"
_TARGET = "<= 200 µs"
_LOSSES = tuple(3.4 - 0.01 * n + 0.003 * (n % 3) for n in range(10))


def run() -> list[Row]:
    """A decision as made by rank 0: it reads the inputs from their file, applies every rule that is
    enabled and writes the record."""
    published = Published(
        age_s=600.0, reason=None, seen_at=1000.0, outer_step=56, inner_step=50, revision="5.56.50"
    )
    network = Network(
        block=7_000_000, outer_step=56, uid=7, reason=None, seen_at=1000.0, commitment="128:00"
    )
    known = GateInputs(
        published, network, "llama-4b-ws-4-007", "128:00", load_profile("sn38").limits, 0.0, 1000.0
    )
    settings = GateSettings()
    small = Candidate("gradient", 56, 84, loss=3.3, recent_losses=_LOSSES, base_outer_step=56)
    full = Candidate(
        "gradient",
        56,
        84,
        loss=3.3,
        recent_losses=_LOSSES,
        base_outer_step=56,
        revision="5.56.84",
        files={"size_bytes": 10**8, "params": 300, "problems": []},
        config={"block_list": [6_999_950] * 900},
        metadata={"run": "5", "outer_step": 56, "inner_step": 84, "peer_id": "x"},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gate-inputs.json"
        gate_inputs.write(path, known)

        def decide(candidate: Candidate) -> object:
            return gate.decide(candidate, gate_inputs.read(path), settings, now=1010.0, wall=0.0)

        assert gate.decide(full, gate_inputs.read(path), settings, now=1010.0, wall=0.0).verdicts
        return [
            _row("a decision: steps, loss, repo, network", lambda: decide(small), _TARGET),
            _row("a decision with files, config, metadata", lambda: decide(full), _TARGET),
            _headers(settings),
            _values(settings),
            _row(
                "`upload_due` alone", lambda: gate.due(gate_inputs.read(path), settings, 1010.0), ""
            ),
        ]


def _headers(settings: GateSettings) -> Row:
    """Checks names, types and shapes of the gradient about to be written; reads no tensor."""
    limits = Limits.of(settings, load_profile("sn38").limits)
    names = [f"model.layers.{n // 9}.part{n % 9}.weight" for n in range(300)]
    tensor = SimpleNamespace(shape=(32, 64, 32), dtype="torch.float32")
    document: dict[str, object] = {"metadata": {}}
    for name in names:
        document |= {f"{name}idxs": tensor, f"{name}vals": tensor}
    shapes = Shapes(dict.fromkeys(names, (2048, 2048)))
    assert outline(document, limits, shapes)["problems"] == []
    what = "headers of a gradient of 300 parameters (1 B)"
    return _row(what, lambda: outline(document, limits, shapes), "<= 1 ms")


def _values(settings: GateSettings) -> Row:
    """Checks the values, which the upload thread reads before it writes them, while training
    continues."""
    import resource

    import torch

    limits = Limits.of(settings, load_profile("sn38").limits)
    names = [f"model.layers.{n // 9}.part{n % 9}.weight" for n in range(300)]
    document: dict[str, object] = {"metadata": {}}
    for name in names:
        document[f"{name}idxs"] = torch.randint(0, 2048, (32, 64, 32), dtype=torch.int16)
        document[f"{name}vals"] = torch.randn(32, 64, 32)
    shapes = Shapes(dict.fromkeys(names, (2048, 2048)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    assert contents(torch, document, limits, shapes)["problems"] == []
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    note = f"{cpu:.2f} s of processor time, {more:.0f} MiB of memory"
    return Row("values of that gradient (118 MB), in the upload thread", wall, "s", "<= 2 s", note)


def _row(what: str, function: Callable[[], object], target: str) -> Row:
    wall = per_call(function, 300)
    start = time.process_time()
    for _ in range(300):
        function()
    processor = (time.process_time() - start) / 300
    return Row(what, 1e6 * wall, "µs", target, f"{1e6 * processor:.0f} µs of processor time")
