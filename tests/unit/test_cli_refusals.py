"""A wrong command line: the message says what happened, the value seen and what to do; the exit
code is right, and there is never a traceback."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.cli.main import run

TABLE = Path(__file__).with_name("cli_refusals.tsv").read_text(encoding="utf-8")
ROWS = [line.split("\t") for line in TABLE.splitlines()[1:]]
FILES = {
    "bad.toml": "garbage",
    "unknown.toml": "[miner]\nfoo = 1\n",
    "negative.toml": "[gpu]\nexpect = -3\n",
    "list.json": "[1]",
    "dotenv.toml": '[repo]\ncredentials = "dotenv"\n',
    "file": "x",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINER_GUARD_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize(("code", "words", "line"), ROWS, ids=[row[2] for row in ROWS])
def test_a_wrong_command_line_is_refused(
    code: str, words: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert run(shlex.split(line)) == int(code)
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert sorted(path.name for path in folder.iterdir()) == before, (
        "a refused input changes nothing"
    )


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("config > /dev/full", 1, b"the output: No space left on device"),
        ("plan --json > /dev/full", 1, b"the output: No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written_is_reported(line: str, code: int, words: bytes) -> None:
    ended = subprocess.run(
        f"{sys.executable} -m miner_guard {line}", shell=True, stderr=subprocess.PIPE, timeout=120
    )
    assert (ended.returncode, b"Traceback" in ended.stderr) == (code, False)
    assert words in ended.stderr


def test_a_reader_that_goes_away_is_not_an_error() -> None:
    line = f"{sys.executable} -m miner_guard plan | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_defect_is_one_line_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by nobody")

    monkeypatch.setattr("miner_guard.cli.plan.document", broken)
    assert run(["plan", "--json"]) == 1
    message = capsys.readouterr().err
    assert "internal error, please report it: ZeroDivisionError: by nobody (" in message
    assert len(message.splitlines()) == 1


def test_the_miners_own_exit_code_2_is_not_a_usage_error() -> None:
    """A miner with wrong arguments (argparse exits with 2) must not look like a wrong guard
    command."""
    line = [
        sys.executable,
        "-m",
        "miner_guard",
        "run",
        "--no-restart",
        "--no-preflight",
        "--",
        "sh",
        "-c",
        "exit 2",
    ]
    assert subprocess.run(line, stdout=subprocess.DEVNULL, timeout=120).returncode == 2
