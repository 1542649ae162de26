"""`miner-guard top` fits any terminal, shows unknown values as unknown, and restores the
terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.cli.screen import (
    WEEK_MARKS,
    Canvas,
    CurveHistory,
    ShownPart,
    duration,
    lines,
    overview,
    progress_bar,
    sparkline,
)
from miner_guard.cli.terminal import coloured
from miner_guard.eventlog.status_document import StatusDocument, StepsStatus
from miner_guard.watch.state import STATES
from tests.support import requires
from tests.support.present_state import write_status

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
        document, CurveHistory(), events, Canvas(width, height), age_s=0, min_inner_step=50
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
            Canvas(80, 24),
            age_s=9,
            min_inner_step=50,
        )
    )
    for words in (
        "miner running  restarts 1  goodput 93%",
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


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_verdict_its_next_step_and_the_state_wrap_and_lose_no_word(width: int) -> None:
    """The first line must not end with "loss 2.92; th…"."""
    verdict = {
        "state": "degraded",
        "earns": "yes",
        "since": "2026-01-02T06:34:00Z",
        "cause": "the gate is blocking an upload that is due: base outer_step (62) < network (63)",
        "next_step": "see each rule: `miner-guard logs --event upload_blocked -n 1 --json`",
        "event": "upload_blocked",
    }
    document = StatusDocument.from_json(
        {**STATUS, "verdict": verdict, "updated": "2026-01-02T06:40:00Z"}
    )
    shown = lines(document, CurveHistory(), [], Canvas(width, 40), age_s=0, min_inner_step=50)
    words = " ".join(" ".join(shown[: shown.index("")]).split())
    assert words.startswith(f"STILL EARNING, degraded since 06:34 UTC: {verdict['cause']} next ")
    assert f"{verdict['next_step']} (more: `miner-guard runbook upload_blocked`)" in words
    assert words.endswith("monitoring 0.12%")


@pytest.mark.parametrize(
    ("state", "inner", "words"),
    [
        ("earning", 84, "84/50 valid now; outer step in"),
        ("not earning", 84, "84/50 minimum reached, but not earning"),
        ("stopped", 34, "34/50 minimum not reached"),
    ],
)
def test_nothing_is_valid_now_while_the_verdict_is_not_earning(
    state: str, inner: int, words: str
) -> None:
    """`loss NaN` and `valid now` must not be on one screen."""
    document = StatusDocument.from_json(
        {**STATUS, "verdict": {"state": state}, "uploads": {}, "steps": {"inner_step": inner}}
    )
    rows = overview(document, CurveHistory(), 120, min_inner_step=50)
    (row,) = [row for row in rows if row.startswith("upload")]
    assert words in row
    assert ("outer step in" in row) == (state == "earning")


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
            Canvas(80, 24),
            age_s=0,
            min_inner_step=50,
        )
    )
    assert "rank 0: 15.2s mem ?" in shown


def test_what_waiting_for_the_minimum_costs_is_shown() -> None:
    forecast = {"min_inner_step": 50, "accepted_from": 1, "waiting_costs_s": 800.0}
    status = {**STATUS, "uploads": {**STATUS["uploads"], "forecast": forecast}}
    canvas, curves = Canvas(80, 24), CurveHistory()
    document = StatusDocument.from_json(status)
    shown = "\n".join(lines(document, curves, [], canvas, age_s=0, min_inner_step=50))
    assert "waiting for inner step 50 means 13m without a score" in shown


def test_ranks_that_do_not_fit_are_counted() -> None:
    ranks = {str(rank): {"step_time_s": 15.2, "gpu_mem_gb": 18.4} for rank in range(16)}
    shown = "\n".join(
        lines(
            StatusDocument.from_json({"steps": {"per_rank": ranks}}),
            CurveHistory(),
            [],
            Canvas(80, 24),
            age_s=0,
            min_inner_step=50,
        )
    )
    assert "rank 7: 15.2s 18.4GB | and 8 more" in shown


def _screen(shown: ShownPart, events: int = 100) -> str:
    ranks = {
        str(rank): {"step_time_s": 15.0, "work_s": 14.0 if rank == 12 else 6.0}
        for rank in range(16)
    }
    events_shown = [f"12:00:{number:02d} info  event {number}." for number in range(events)]
    status = StatusDocument.from_json({"steps": {"per_rank": ranks}})
    canvas = Canvas(80, 24, shown)
    return "\n".join(
        lines(status, CurveHistory(), events_shown, canvas, age_s=0, min_inner_step=50)
    )


def test_of_sixteen_ranks_the_slow_one_is_first_unless_sorted_by_number() -> None:
    """A straggler must not hide behind "and 8 more"."""
    assert _screen(ShownPart()).index("rank 12:") < _screen(ShownPart()).index("rank 0:")
    assert "rank 12:" not in _screen(ShownPart().after("sort"))


def test_events_scroll_and_say_how_many_are_newer() -> None:
    assert "event 99." in _screen(ShownPart())
    earlier = ShownPart().after("page up", page=12).after("up")
    assert "event 86." in _screen(earlier)
    assert "event 87." not in _screen(earlier)
    assert "last events, 13 newer below" in _screen(earlier)
    assert "event 99." in _screen(earlier.after("page down", page=12).after("down"))
    assert "event 0." in _screen(ShownPart(scrolled=10_000)), "never beyond the first"


def test_help_names_the_keys_and_any_key_closes_it() -> None:
    shown = ShownPart().after("help")
    assert "s              sort ranks" in _screen(shown)
    assert not shown.after("quit").help


def test_a_pause_is_named_where_it_is_ended() -> None:
    assert "(paused: space continues)" in _screen(ShownPart().after("pause"))
    assert "paused" not in _screen(ShownPart().after("pause").after("pause"))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("NOT EARNING since 12:03 UTC: x", "NOT EARNING"),
        ("STILL EARNING, degraded since 12:03 UTC: x", "STILL EARNING, degraded"),
        ("12:00:00 critical HANG DETECTED", "critical"),
        ("gate   BLOCKED 3m ago: x", "BLOCKED"),
    ],
)
def test_colour_marks_the_word_that_matters_and_changes_no_width(line: str, word: str) -> None:
    shown = coloured(line)
    assert re.search(rf"\x1b\[3[13]m{word}\x1b\[0m", shown)
    assert re.sub(r"\x1b\[\d+m", "", shown) == line


@pytest.mark.parametrize("cells", ["··▁?x▅█", "..!?x+#"])
def test_each_cell_of_the_week_has_its_colour_and_is_clear_without_it(cells: str) -> None:
    line = f"week   {cells}  earning 93%, not earning 7%"
    shown = coloured(line)
    assert re.findall(r"\x1b\[(\d+)m(.)", shown.replace("\x1b[0m", "")) == [
        *zip(("31", "33", "31", "33", "32"), cells[2:], strict=True)
    ]
    assert re.sub(r"\x1b\[\d+m", "", shown) == line
    assert len({marks[0] for marks in WEEK_MARKS.values()}) == len(WEEK_MARKS) == len(STATES)
    assert len({marks[1] for marks in WEEK_MARKS.values()}) == len(WEEK_MARKS)


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
    write_status(tmp_path, STATUS)
    assert run(["top", "--state-dir", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "miner running" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("end", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_in_a_terminal_it_sends_only_what_changed_and_gives_the_screen_back(
    tmp_path: Path, end: bytes
) -> None:
    write_status(tmp_path, STATUS)
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
    write_status(tmp_path, {**STATUS, "restarts": 7})
    update = _read(ours, b"restarts 7")
    assert len(update) < 400, "a change of one line is not a whole screen"
    assert b"x" not in update.replace(b"\x1b", b""), "keys are not echoed into the screen"
    os.write(ours, end)
    assert b"\x1b[?1049l" in _read(ours, b"\x1b[?1049l")
    assert child.wait(timeout=20) == 0
    assert termios.tcgetattr(theirs) == before, "the shell's terminal is as it was"
    os.close(theirs)
    os.close(ours)


def _open_top(folder: Path, **env: str) -> tuple[int, subprocess.Popen[bytes]]:
    write_status(folder, {**STATUS, "verdict": {"state": "earning", "cause": "x"}})
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    program = str(Path(sys.executable).with_name("miner-guard"))
    command = [program, "top", "--state-dir", str(folder), "--every", "600"]
    child = subprocess.Popen(
        [requires.tool("setsid"), "--ctty", *command],
        stdin=theirs,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1", **env},
    )
    os.close(theirs)
    return ours, child


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize is of Python 3.11")
def test_a_resize_and_a_key_show_at_once_and_not_at_the_next_refresh(tmp_path: Path) -> None:
    ours, child = _open_top(tmp_path)
    assert b"\x1b[32mEARNING" in _read(ours, b"last events")
    os.write(ours, b"?")
    _read(ours, b"keys of miner-guard top")
    os.write(ours, b"x")
    _read(ours, b"last events")
    termios.tcsetwinsize(ours, (40, 100))
    assert b"\x1b[40;1H" in _read(ours, b"\x1b[40;1H")
    os.write(ours, b"q")
    assert child.wait(timeout=20) == 0
    os.close(ours)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize is of Python 3.11")
def test_no_color_is_respected(tmp_path: Path) -> None:
    ours, child = _open_top(tmp_path, NO_COLOR="1")
    assert b"\x1b[32m" not in _read(ours, b"last events")
    os.write(ours, b"q")
    assert child.wait(timeout=20) == 0
    os.close(ours)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize is of Python 3.11")
def test_a_dumb_terminal_gets_one_plain_screen(tmp_path: Path) -> None:
    ours, child = _open_top(tmp_path, TERM="dumb")
    assert b"\x1b" not in _read(ours, b"last events")
    assert child.wait(timeout=20) == 0
    os.close(ours)


def _read(fd: int, until: bytes) -> bytes:
    data, deadline = b"", time.monotonic() + 30
    while until not in data:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"{until!r} did not come within 30 s: {data!r}"
        data += os.read(fd, 65536)
    return data
