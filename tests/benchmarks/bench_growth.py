"""How the guard's lines and records grow with the number of ranks, on synthetic records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from miner_guard.config import HangSettings
from miner_guard.eventlog.catalog import make_finding, message
from miner_guard.rank import layout
from miner_guard.rank.journal import DiagnosisEntry, pack
from miner_guard.rank.layout import Now
from miner_guard.watch.hang import HangDetector
from tests.benchmarks.frame import Row
from tests.support.rank_reports import GIB, report

TITLE = "Growth with the ranks, 8 a node, synthetic records"

SIZES = (8, 64, 256, 1024)


def run() -> list[Row]:
    """One row per quantity: its value at the largest number of ranks, with the other values in the
    note."""
    measured: list[tuple[str, Callable[[int], float], str, str]] = [
        ("the line of a hang: half in data, half waiting", _hang_line, "bytes", "< 300"),
        ("the line of a late rank", _late_line, "bytes", "< 300"),
        ("the block GPU DIAGNOSTICS", _block, "bytes", "< 2000"),
        ("the diagnosis in the journal", _entries, "entries", f"<= {layout.JOURNAL_SLOTS}"),
        ("a check for a hang", _check_us, "us", ""),
    ]
    rows = []
    for what, measure, unit, target in measured:
        values = [measure(ranks) for ranks in SIZES]
        sizes = zip(SIZES[:-1], values[:-1], strict=True)
        note = ", ".join(f"{ranks} ranks: {value:.0f}" for ranks, value in sizes)
        rows.append(Row(f"{what}, {SIZES[-1]:,} ranks", values[-1], unit, target, note))
    return rows


def _headers(ranks: int, waiting: str) -> dict[int, Now]:
    def header(rank: int) -> Now:
        phase = "data" if rank < ranks // 2 else waiting
        since = 100.0 - rank % 7
        return Now("running", phase, since, since, 1, 10, 10, *[None] * 4, 10, 0, 0, 0)

    return {rank: header(rank) for rank in range(ranks)}


def _hang_line(ranks: int) -> float:
    detector = HangDetector(HangSettings())
    detector.launched(0.0)
    hang = detector.check(10_000.0, _headers(ranks, "allreduce"))
    assert hang is not None
    found = make_finding(
        "hang_detected",
        detail=hang.detail,
        culprits=list(hang.culprits),
        idle_s=hang.idle_s,
        limit_s=hang.limit_s,
        frames={},
    )
    return len(message(found).encode())


def _late_line(ranks: int) -> float:
    hang = HangDetector(HangSettings()).late(160.0, _headers(ranks, "collective"), 60.0)
    return len(hang.detail.encode())


def _block(ranks: int) -> float:
    reports = [report(r, allocated_bytes=(18 + r % 3) * GIB) for r in range(ranks)]
    found = ranks.findings(reports, ranks)
    return sum(len(message(f).encode()) for f in found if f.event == "gpu_diagnostics")


def _entries(ranks: int) -> float:
    reports = [
        report(r, uuid=f"GPU-{r:032d}", host=f"node-{r // 8}", boot=f"{r // 8:08x}")
        for r in range(ranks)
    ]
    parts = pack(reports)
    entries = [DiagnosisEntry(t=1.0, report=part).to_json() for part in parts]
    longest = max(len(json.dumps(e, separators=(",", ":")).encode()) for e in entries)
    assert longest <= layout.SLOT_PAYLOAD
    return len(parts)


def _check_us(ranks: int) -> float:
    detector = HangDetector(HangSettings())
    detector.launched(0.0)
    headers, rounds = _headers(ranks, "allreduce"), 20
    started = time.process_time()
    for _ in range(rounds):
        detector.check(1.0, headers)
    return (time.process_time() - started) / rounds * 1e6
