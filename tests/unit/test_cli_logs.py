"""`miner-guard logs`: filters, exit codes and output as documented."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli import options
from miner_guard.cli.main import run
from miner_guard.exits import Refused
from miner_guard.record.events import event
from miner_guard.record.store import StoredEvent
from miner_guard.system.clock import FakeClock
from tests.support.guard_log import Log
from tests.support.present_state import write_status


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory whose log holds 30 messages and one failed upload."""
    log = Log(tmp_path)
    for number in range(30):
        log.emit(event("rank_message", "info", f"message {number}", rank=number % 2))
    log.say("upload_failed", "error", reason="403 Forbidden")
    return tmp_path


def test_one_event_is_found_and_printed_as_on_the_console(
    state: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    one = ["logs", "--state-dir", str(state), "--event", "upload_failed"]
    for flags, mark in (([], "❌ "), (["--no-emoji"], "")):
        assert run([*one, *flags]) == 0
        assert capfdbinary.readouterr().out.decode() == (
            f"2026-01-02T03:04:05.000Z | ERROR | guard | {mark}UPLOAD FAILED: 403 Forbidden\n"
        )


def test_a_blocks_headline_is_its_first_line_with_words() -> None:
    text = "=====\n🔍 GPU DIAGNOSTICS\n====="
    hit = StoredEvent(1, "", "info", "gpu_diagnostics", 0, "r1", "h", text, "{}")
    assert hit.headline == "🔍 GPU DIAGNOSTICS"
    assert replace(hit, text="").headline == ""


@pytest.mark.parametrize(
    ("arguments", "code", "messages"),
    [
        ("--rank 1", 0, [f"message {n}" for n in range(1, 30, 2)]),
        ("--event gpu_drop", 1, []),
        ("-n 2", 0, ["message 29", "UPLOAD FAILED: 403 Forbidden"]),
    ],
)
def test_json_is_one_document_of_what_was_asked_for(
    state: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    arguments: str,
    code: int,
    messages: list[str],
) -> None:
    assert run(["logs", "--state-dir", str(state), *arguments.split(), "--json"]) == code
    assert [e["msg"] for e in json.loads(capfdbinary.readouterr().out)] == messages


def test_following_shows_the_last_ten_lines_and_then_new_ones(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(30):
        log.say("rank_message", text=str(number))
    program = str(Path(sys.executable).with_name("miner-guard"))
    child = subprocess.Popen(
        [program, "logs", "--follow", "--json", "--state-dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert [json.loads(child.stdout.readline())["text"] for _ in range(10)] == [
        str(n) for n in range(20, 30)
    ]
    for number in range(30, 60):
        log.say("rank_message", text=str(number))
    assert [json.loads(child.stdout.readline())["text"] for _ in range(30)] == [
        str(n) for n in range(30, 60)
    ]
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20) == 0
    child.stdout.close()


@pytest.mark.parametrize(
    ("state", "age_s", "words"),
    [
        ({"state": "done", "exit_code": 75}, 0.0, "STOPPED: the guard gave up"),
        ({"state": "running"}, 600.0, "GUARD GONE: the guard was killed or is stuck"),
    ],
)
def test_where_no_guard_runs_status_says_how_the_last_one_ended(
    tmp_path: Path,
    state: dict[str, Any],
    age_s: float,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdict = {"life": "stopped", "colour": "red", "cause": "the guard gave up"}
    write_status(tmp_path, {**state, "verdict": verdict}, age_s=age_s)
    assert run(["status", "--state-dir", str(tmp_path)]) == 3
    assert words in capsys.readouterr().out
    assert run(["status", "--check", "--state-dir", str(tmp_path)]) == 3
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", "2026-01-02T03:02:35.000000Z"),
        ("1h", "2026-01-02T02:04:05.000000Z"),
        ("1.5d", "2025-12-31T15:04:05.000000Z"),
        ("99999999999d", "1970-01-01T00:00:00.000000Z"),
        ("2026-01-02", "2026-01-02T00:00:00.000000Z"),
        ("2026-01-02T03:04Z", "2026-01-02T03:04:00.000000Z"),
        ("2026-01-02T03:04:05.500", "2026-01-02T03:04:05.500000Z"),
    ],
)
def test_since_takes_durations_and_times(text: str, expected: str) -> None:
    assert options.earliest(text, FakeClock().wall()) == expected


@pytest.mark.parametrize("text", ["yesterday", "1y", "-1h", "2026-1-2", "2026-02-30"])
def test_since_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(Refused, match="use 90s"):
        options.earliest(text, 0.0)
