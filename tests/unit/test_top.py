"""`miner-guard top`: fits any terminal, says unknown where nothing is known, restores the
terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.cli.screen import CurveHistory, duration, lines, progress_bar, sparkline
from miner_guard.eventlog.status_document import StatusDocument, StepsStatus
from miner_guard.state_dir import write_json
from tests.support import requires

STATUS: dict[str, Any] = {
    "state": "running",
    "restarts": 1,
    "steps": {
        "outer_step": 56,
        "inner_step": 34,
        "total_steps": 900,
        "loss": 3.4,
        "step_time_s": 15.2,
        "p50_s": 15.0,
        "p95_s": 18.0,
        "last_step_age_s": 3,
        "eta_upload_s": 240,
        "eta_outer_s": 7000,
        "goodput": {"training": 0.93},
        "per_rank": {str(rank): {"step_time_s": 15.2, "gpu_mem_gb": 18.4} for rank in range(4)},
    },
    "uploads": {
        "repo": {"age_s": 612, "limit_s": 2000, "revision": "5.56.20"},
        "decision": {"allowed": False, "reason": "inner_step (34) < minimum (50)"},
    },
    "health": {
        "gpus": {"gpus": [{"index": 0, "state": "lost", "utilization_ratio": 0.97}]},
        "host": {"cpu_pct": 41.0},
    },
    "costs": {"share_pct": 0.12},
}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60)])
@pytest.mark.parametrize("status", [STATUS, {}, None], ids=["full", "empty", "none"])
def test_the_screen_has_the_terminals_size(
    width: int, height: int, status: dict[str, Any] | None
) -> None:
    document = None if status is None else StatusDocument.from_json(status)
    events = [f"12:00:00 warning  SLOW STEP {number} " + "x" * 300 for number in range(50)]
    shown = lines(
        document, CurveHistory(), events, width=width, height=height, age_s=0, min_inner_step=50
    )
    assert len(shown) == height
    assert max(map(len, shown)) <= width


def test_an_80_by_24_terminal_shows_what_matters() -> None:
    curves = CurveHistory()
    for step in range(100):
        curves.take(StepsStatus(total_steps=step, loss=5 - step / 50, step_time_s=15 + step % 3))
    shown = "\n".join(
        lines(
            StatusDocument.from_json(STATUS),
            curves,
            ["12:00:00 info  REPO"],
            width=80,
            height=24,
            age_s=9,
            min_inner_step=50,
        )
    )
    for words in (
        "miner  running  restarts 1  goodput 93%",
        "OLD: as of 9s ago",
        "outer 56 inner 34",
        "34/50 valid in 4m",
        "outer step in 1.9h",
        "612s of 2,000s (fresh) 5.56.20",
        "BLOCKED: inner_step (34)",
        "rank 3: 15.2s 18.4GB",
        "gpu0 97%",
        "LOST",
        "12:00:00 info  REPO",
    ):
        assert words in shown


def test_a_ranks_unknown_memory_is_named() -> None:
    status = {
        **STATUS,
        "steps": {**STATUS["steps"], "per_rank": {"0": {"step_time_s": 15.2, "gpu_mem_gb": None}}},
    }
    shown = "\n".join(
        lines(
            StatusDocument.from_json(status),
            CurveHistory(),
            [],
            width=80,
            height=24,
            age_s=0,
            min_inner_step=50,
        )
    )
    assert "rank 0: 15.2s mem ?" in shown


def test_ranks_that_do_not_fit_are_counted() -> None:
    ranks = {str(rank): {"step_time_s": 15.2, "gpu_mem_gb": 18.4} for rank in range(16)}
    shown = "\n".join(
        lines(
            StatusDocument.from_json({"steps": {"per_rank": ranks}}),
            CurveHistory(),
            [],
            width=80,
            height=24,
            age_s=0,
            min_inner_step=50,
        )
    )
    assert "rank 7: 15.2s 18.4GB | and 8 more" in shown


def test_curves_and_bars_without_unicode() -> None:
    assert sparkline([1, 2, 3, float("nan")], 10, ascii_only=True) == "_+#"
    assert sparkline([], 10) == ""
    assert sparkline([5, 5], 10) == "▁▁"
    assert progress_bar(25, 50, 10, ascii_only=True) == "#####....."
    assert progress_bar(900, 50, 4) == "████"
    assert [duration(s) for s in (None, 5, 600, 7200, 200_000)] == [
        "?",
        "5s",
        "10m",
        "2.0h",
        "2.3d",
    ]


def test_one_screen_into_a_pipe_and_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--state-dir", str(tmp_path)]) == 3
    write_json(tmp_path / "status.json", STATUS)
    assert run(["top", "--state-dir", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "miner  running" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("end", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_in_a_terminal_it_sends_only_what_changed_and_gives_the_screen_back(
    tmp_path: Path, end: bytes
) -> None:
    write_json(tmp_path / "status.json", STATUS)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    program = str(Path(sys.executable).with_name("miner-guard"))
    child = subprocess.Popen(
        # `setsid --ctty`: Ctrl-C is a signal only where the terminal is the session's own.
        [
            requires.tool("setsid"),
            "--ctty",
            program,
            "top",
            "--state-dir",
            str(tmp_path),
            "--every",
            "0.2",
        ],
        stdin=theirs,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
    )
    first = _read(ours, b"last events")
    assert b"\x1b[?1049h" in first
    os.write(ours, b"x")
    write_json(tmp_path / "status.json", {**STATUS, "restarts": 7})
    update = _read(ours, b"restarts 7")
    assert len(update) < 400, "a change of one line is not a whole screen"
    assert b"x" not in update.replace(b"\x1b", b""), "keys are not echoed into the screen"
    os.write(ours, end)
    assert b"\x1b[?1049l" in _read(ours, b"\x1b[?1049l")
    assert child.wait(timeout=20) == 0
    assert termios.tcgetattr(theirs) == before, "the shell's terminal is as it was"
    os.close(theirs)
    os.close(ours)


def _read(fd: int, until: bytes) -> bytes:
    data, deadline = b"", time.monotonic() + 30
    while until not in data:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"{until!r} did not come within 30 s: {data!r}"
        data += os.read(fd, 65536)
    return data
