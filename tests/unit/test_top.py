"""`miner-guard top` fits any terminal, shows unknown values as unknown and every rank, and restores
the terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.cli.screen import WEEK_MARKS, View, lines, painted, sparkline
from miner_guard.record.status_document import StatusDocument
from miner_guard.watch.state_words import GREEN, GREY, RED, WORST_FIRST, YELLOW
from tests.support import requires
from tests.support.present_state import write_status

STATUS: dict[str, Any] = {
    "state": "running",
    "verdict": {"life": "training", "colour": "green", "cause": "x"},
    "attempt": 1,
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
        "min_inner_step": 50,
        "decision": {"allowed": False, "reason": "inner_step (34) < minimum (50)"},
    },
    "health": {
        "gpus": {"gpus": [{"index": 0, "state": "lost", "utilization_ratio": 0.97}]},
        "host": {"cpu_pct": 41.0},
    },
    "costs": {"share_pct": 0.12},
}


def shown(status: dict[str, Any], width: int = 80, height: int | None = 24, **view: Any) -> str:
    document = StatusDocument.from_json(status)
    return "\n".join(lines(document, (width, height), View(**view)))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (120, 30), (200, 60)])
@pytest.mark.parametrize("status", [STATUS, {}, None], ids=["full", "empty", "none"])
def test_the_screen_has_the_terminals_size(
    width: int, height: int, status: dict[str, Any] | None
) -> None:
    document = None if status is None else StatusDocument.from_json(status)
    view = View(
        events=[f"12:00:00 warning  SLOW STEP {number} " + "x" * 300 for number in range(50)]
    )
    rows = lines(document, (width, height), view)
    assert len(rows) == height
    assert max(map(len, rows)) <= width


def test_an_80_by_24_terminal_shows_what_matters() -> None:
    falling = [5 - step / 50 for step in range(100)]
    view = View(loss=falling, step_time=[15.0] * 100, events=["12:00:00Z info  REPO"])
    document = replace(StatusDocument.from_json(STATUS), age_s=9.0)
    screen = "\n".join(lines(document, (80, 24), view))
    for words in (
        "miner training  restarts 1  goodput 93%",
        "OLD: as of 9 s ago",
        "outer 56 inner 34",
        "34/50 valid in 4 min",
        "outer step in 1.9 h",
        "612s of 2000s (fresh) 5.56.20",
        "BLOCKED: inner_step (34)",
        "rank 3: 15.2s 18.4GB",
        "gpu0 97%",
        "LOST",
        "12:00:00Z info  REPO",
        "q quit  p pause",
    ):
        assert words in screen


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_headline_its_next_step_and_the_run_wrap_and_lose_no_word(width: int) -> None:
    """The first line must not end with "loss 2.92; th…"."""
    verdict = {
        "life": "training",
        "health": "degraded",
        "earning": "yes",
        "since": "2026-01-02T06:34:00Z",
        "cause": "the gate is blocking an upload that is due: base outer_step (62) < network (63)",
        "next_step": "see each rule: `miner-guard logs --event upload_blocked -n 1 --json`",
        "event": "upload_blocked",
    }
    rows = shown({**STATUS, "verdict": verdict, "updated": "2026-01-02T06:40:00Z"}, width, 40)
    words = " ".join(rows.partition("\n\n")[0].split())
    assert words.startswith(
        f"EARNING, degraded since 06:34 UTC: {verdict['cause']} earns yes next "
    )
    assert f"{verdict['next_step']} (more: `miner-guard explain upload_blocked`)" in words
    assert words.endswith("monitoring 0.12%")


@pytest.mark.parametrize(
    ("state", "inner", "words"),
    [
        ({"life": "training", "earning": "yes"}, 84, "84/50 valid now; outer step in"),
        ({"life": "training", "earning": "no"}, 84, "84/50 minimum reached"),
        ({"life": "stopped"}, 34, "34/50 minimum not reached"),
    ],
)
def test_nothing_is_valid_now_while_the_miner_does_not_earn(
    state: dict[str, str], inner: int, words: str
) -> None:
    """`loss NaN` and `valid now` must not be on one screen."""
    uploads = {"min_inner_step": 50}
    steps = {"inner_step": inner, "eta_outer_s": 7000.0}
    document = StatusDocument.from_json(
        {**STATUS, "verdict": state, "uploads": uploads, "steps": steps}
    )
    rows = lines(document, (120, None))
    (row,) = [row for row in rows if row.startswith("upload")]
    assert words in row
    assert ("outer step in" in row) == (state.get("earning") == "yes")


def test_what_is_unknown_is_named() -> None:
    rank = {"step_time_s": 15.2, "gpu_mem_gb": None}
    gpus = {"gpus": {"gpus": [{"index": 0}]}}
    assert "rank 0: 15.2s ?" in shown({"steps": {"per_rank": {"0": rank}}, "health": gpus})
    assert "34/?" in shown({"steps": {"inner_step": 34}})


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 24), (120, 30), (200, 50)])
@pytest.mark.parametrize("count", [16, 256])
def test_every_rank_can_be_reached_and_the_slow_one_comes_first(
    width: int, height: int, count: int
) -> None:
    ranks = {
        str(rank): {"step_time_s": 15.0, "work_s": 14.0 if rank == 12 else 6.0}
        for rank in range(count)
    }
    status = {**STATUS, "steps": {"per_rank": ranks}}
    pages = [shown(status, width, height, page=page) for page in range(count)]
    assert re.search(r"rank 12: 15s own 14s \? SLOW", pages[0])
    assert [rank for rank in ranks if not any(f"rank {rank}:" in page for page in pages)] == []
    whole = shown(status, width, None)
    assert [rank for rank in ranks if f"rank {rank}:" not in whole] == []


def test_the_headline_has_the_states_colour_and_colour_changes_no_width() -> None:
    rows = ["HUNG since 12:03 UTC: x", "12:00:00Z critical HANG DETECTED", "gate   BLOCKED 3m ago"]
    for colour, style in ((RED, "bold red"), (GREEN, "green"), (YELLOW, "yellow"), (GREY, "dim")):
        text = painted(rows, View(colour=colour))
        assert text.plain == "\n".join(rows)
        spans = [(text.plain[s.start : s.end].strip(), str(s.style)) for s in text.spans if s.style]
        assert spans == [
            (rows[0], style),
            ("12:00:00Z critical", "bold red"),
            ("BLOCKED", "bold red"),
        ]
    cells = painted(["past   ··▁░▅█  well 93%"], View())
    assert [str(span.style) for span in cells.spans if span.style][-4:] == [
        "bold red",
        "dim",
        "yellow",
        "green",
    ]
    assert len(set(WEEK_MARKS.values())) == len(WORST_FIRST)
    old = painted(["GUARD GONE", "next   x", "now    12:03", "steps  y"], View(old=True))
    dim = [old.plain[span.start : span.end].strip() for span in old.spans if span.style == "dim"]
    assert dim == ["GUARD GONE", "steps  y"], "figures that are not of now"


def test_curves() -> None:
    assert sparkline([1, 2, 3, float("nan")], 10) == "▁▅█"
    assert sparkline([], 10) == ""
    assert sparkline([5, 5], 10) == "▁▁"


def test_one_screen_into_a_pipe_and_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--state-dir", str(tmp_path)]) == 3
    write_status(tmp_path, STATUS)
    assert run(["top", "--state-dir", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "miner training" in out
    assert "\x1b" not in out


def _open_top(
    folder: Path, width: int = 80, **env: str
) -> tuple[int, int, subprocess.Popen[bytes]]:
    write_status(folder, STATUS)
    ours, theirs = pty.openpty()
    program = str(Path(sys.executable).with_name("miner-guard"))
    command = [program, "top", "--state-dir", str(folder), "--every", "0.2"]
    clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    child = subprocess.Popen(
        # `setsid --ctty`: Ctrl-C is a signal only where the terminal is the session's own.
        [requires.tool("setsid"), "--ctty", *command],
        stdin=theirs,
        stdout=theirs,
        env={
            **clean,
            "TERM": "xterm",
            "COLUMNS": str(width),
            "LINES": "24",
            "PYTHONUTF8": "1",
            **env,
        },
    )
    return ours, theirs, child


@pytest.mark.parametrize(("width", "end"), [(60, b"q"), (80, b"\x03"), (120, b"q"), (200, b"q")])
def test_in_a_terminal_it_follows_the_state_and_gives_the_screen_back(
    tmp_path: Path, width: int, end: bytes
) -> None:
    ours, theirs, child = _open_top(tmp_path, width)
    before = termios.tcgetattr(theirs)
    screen = _read(ours, b"q quit")
    assert b"\x1b[32mTRAINING" in screen
    rows = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.decode()).splitlines()
    assert max(map(len, rows)) <= width
    assert any(row.startswith("earns  ") for row in rows)
    write_status(tmp_path, {**STATUS, "restarts": 7})
    _read(ours, b"restarts 7")
    os.write(ours, b"p")
    _read(ours, b"paused: p continues")
    write_status(tmp_path, {**STATUS, "restarts": 8})
    os.write(ours, b"p")
    _read(ours, b"restarts 8")
    os.write(ours, end)
    assert b"\x1b[?1049l" in _read(ours, b"\x1b[?1049l")
    assert child.wait(timeout=20) == 0
    assert termios.tcgetattr(theirs) == before, "the shell's terminal is as it was"
    os.close(theirs)
    os.close(ours)


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(tmp_path: Path, env: dict[str, str]) -> None:
    ours, theirs, child = _open_top(tmp_path, **env)
    screen = _read(ours, b"gpu0")
    assert b"\x1b[32m" not in screen
    assert (b"\x1b" in screen) == ("TERM" not in env)
    os.write(ours, b"q")
    assert child.wait(timeout=20) == 0
    os.close(theirs)
    os.close(ours)


def _read(fd: int, until: bytes) -> bytes:
    data, deadline = b"", time.monotonic() + 30
    while until not in data:
        assert time.monotonic() < deadline, data[-3000:]
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"{until!r} did not come within 30 s: {data[-3000:]!r}"
        data += os.read(fd, 65536)
    return data
