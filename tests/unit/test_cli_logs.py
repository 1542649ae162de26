"""`miner-guard logs`: filters, exit codes and output as documented."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miner_guard.cli import options
from miner_guard.cli.main import run
from miner_guard.exits import Refused
from miner_guard.record.emitter import Emitter, StoreSink
from miner_guard.record.events import event
from miner_guard.record.redaction import Redactor
from miner_guard.record.store import RunStore, StoredEvent
from miner_guard.system.clock import FakeClock


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory whose log holds 30 messages and one failed upload."""
    store = RunStore(tmp_path / "run.db")
    emitter = Emitter(FakeClock(), "r1", Redactor(), [StoreSink(lambda *row: store.write(row))])
    for number in range(30):
        emitter.emit(event("rank_message", "info", f"message {number}", rank=number % 2))
    emitter.emit(
        event("upload_failed", "error", "UPLOAD FAILED: 403 Forbidden", reason="403 Forbidden")
    )
    return tmp_path


def test_one_event_is_found_and_printed_as_on_the_console(
    state: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["logs", "--state-dir", str(state), "--event", "upload_failed"]) == 0
    assert capfdbinary.readouterr().out.decode() == (
        "2026-01-02T03:04:05.000Z | ERROR | guard | ❌ UPLOAD FAILED: 403 Forbidden\n"
    )


def test_a_blocks_headline_is_its_first_line_with_words() -> None:
    text = "=====\n🔍 GPU DIAGNOSTICS\n====="
    hit = StoredEvent(1, "", "info", "gpu_diagnostics", 0, "r1", "h", text, "{}")
    assert hit.headline == "🔍 GPU DIAGNOSTICS"
    assert replace(hit, text="").headline == ""


def test_json_is_one_document(state: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["logs", "--state-dir", str(state), "--rank", "1", "--json"]) == 0
    assert [e["msg"] for e in json.loads(capfdbinary.readouterr().out)] == [
        f"message {n}" for n in range(1, 30, 2)
    ]


def test_nothing_matched_is_exit_1_and_an_empty_document(
    state: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["logs", "--state-dir", str(state), "--event", "gpu_drop", "--json"]) == 1
    assert json.loads(capfdbinary.readouterr().out) == []


def test_the_last_lines_only(state: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["logs", "--state-dir", str(state), "-n", "2", "--no-emoji"]) == 0
    assert [
        line.rsplit("| ", 1)[1] for line in capfdbinary.readouterr().out.decode().splitlines()
    ] == ["message 29", "UPLOAD FAILED: 403 Forbidden"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--event", "slowstep"], "unknown event 'slowstep'"),
        (["--level", "loud"], "allowed: debug, info, warning, error, critical"),
        (["--since", "yesterday"], "'yesterday' is not a time"),
    ],
)
def test_an_invalid_request_is_refused(
    state: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["logs", "--state-dir", str(state), *arguments]) == 64
    assert words in capsys.readouterr().err


def test_a_state_directory_that_is_not_there_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "--state-dir", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_following_shows_the_last_ten_lines_and_then_new_ones(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.db")
    emitter = Emitter(FakeClock(), "r1", Redactor(), [StoreSink(lambda *row: store.write(row))])
    for number in range(30):
        emitter.emit(event("rank_message", "info", str(number), text=str(number)))
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
        emitter.emit(event("rank_message", "info", str(number), text=str(number)))
    assert [json.loads(child.stdout.readline())["text"] for _ in range(30)] == [
        str(n) for n in range(30, 60)
    ]
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20) == 0
    child.stdout.close()


@pytest.mark.parametrize(
    ("ended", "words"), [(True, "GUARD STOPPED: exit code 75, crash loop"), (False, "was killed")]
)
def test_where_no_guard_runs_status_says_how_the_last_one_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: bool, words: str
) -> None:
    """`logs` must not advise starting a guard that has just given up without saying why it gave
    up."""
    store = RunStore(tmp_path / "run.db")
    emitter = Emitter(FakeClock(), "r1", Redactor(), [StoreSink(lambda *row: store.write(row))])
    emitter.emit(
        event(
            "guard_started",
            "info",
            f"GUARD STARTED: version 1, pid {1}, state {tmp_path!s}",
            version="1",
            pid=1,
            state_dir=str(tmp_path),
        )
    )
    if ended:
        emitter.emit(
            event(
                "guard_stopped",
                "info",
                "GUARD STOPPED: exit code 75, crash loop: exit code 1",
                exit_code=75,
                reason="crash loop: exit code 1",
            )
        )
    assert run(["status", "--state-dir", str(tmp_path)]) == 3
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
        ("2026-01-02T03:04:05.5", "2026-01-02T03:04:05.500000Z"),
    ],
)
def test_since_takes_durations_and_times(text: str, expected: str) -> None:
    assert options.earliest(text, FakeClock().wall()) == expected


@pytest.mark.parametrize("text", ["yesterday", "1y", "-1h", "2026-1-2", "2026-02-30"])
def test_since_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(Refused, match="use 90s"):
        options.earliest(text, 0.0)
