"""A wrong command line: the message says what happened, the value seen and what to do; the exit
code is right, and there is never a traceback."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.cli.main import run

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


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("nosuch", 64, "No such command 'nosuch'"),
        ("run", 64, "no command to run; write it after `--`"),
        ("run -- nosuchprogram", 64, "command 'nosuchprogram' was not found; check the spelling"),
        (
            "run -- FOO=1 python train.py",
            64,
            "command 'FOO=1' was not found; wrap a shell command as: sh -c 'COMMAND'",
        ),
        (
            "run -- 'my miner/train.sh'",
            64,
            "command 'my miner/train.sh' was not found; check the spelling",
        ),
        (
            "run -- 'true && true'",
            64,
            "command 'true && true' was not found; wrap a shell command as: sh -c",
        ),
        ("run -- ./file", 64, "command './file' is not executable"),
        (
            "run --attach foo -- true",
            64,
            "miner.attach = 'foo' is not allowed; allowed: 'sn38', 'auto' or 'log'",
        ),
        (
            "run --max-restarts -1 -- true",
            64,
            "restart.max_restarts = -1 is not allowed; allowed: greater than or equal to 0",
        ),
        ("run --finished-code 999 -- true", 64, "--finished-code"),
        (
            "run -c missing.toml -- true",
            78,
            "missing.toml: cannot be read: No such file or directory",
        ),
        ("run -c bad.toml -- true", 78, "bad.toml: not valid TOML"),
        ("run -c folder -- true", 78, "folder: cannot be read: Is a directory"),
        (
            "run -c unknown.toml -- true",
            78,
            "unknown key miner.foo; allowed in [miner]: profile, attach",
        ),
        (
            "run -c negative.toml -- true",
            78,
            "gpu.expect = -3 is not allowed; allowed: 'auto' or greater than or equal to 0",
        ),
        ("run --name a/b -- true", 78, "--name 'a/b' is not a valid directory name"),
        (
            "run --state-dir file --no-preflight -- true",
            78,
            "file: File exists; make it writable, or choose another",
        ),
        ("doctor nosuchprogram", 64, "command 'nosuchprogram' was not found"),
        ("status", 3, "no guard has run in"),
        ("top", 3, "no guard has run in"),
        ("ctl pause", 3, "no guard is running in"),
        ("ctl foo", 64, "foo"),
        ("logs", 1, "does not exist"),
        ("logs --event slow_steps", 64, "unknown event 'slow_steps'; did you mean slow_step?"),
        ("logs --level loud", 64, "unknown level 'loud'; allowed: debug, info"),
        ("logs --since yesterday", 64, "--since: 'yesterday' is not a time; use 90s, 15m"),
        ("logs --rank -1", 64, "--rank"),
        (
            "logs --state-dir folder --ledger nosuch",
            64,
            "there is no table 'nosuch'; the tables are decision",
        ),
        (
            "logs --state-dir folder --ledger uploads --rank 0",
            64,
            "--ledger works only with --since, --lines and --json",
        ),
        ("gate --outer-step 1", 64, "Missing option '--inner-step'"),
        (
            "gate --outer-step 1 --inner-step 50 --kind foo",
            64,
            "--kind 'foo' is unknown; allowed: gradient, archive",
        ),
        ("gate --outer-step 1 --inner-step 50 --gradients missing.pt", 64, "missing.pt"),
        (
            "gate --outer-step 1 --inner-step 50 --config-json list.json",
            64,
            "list.json does not contain a JSON object",
        ),
        ("explain nosuch.log", 64, "nosuch.log can't be read: No such file"),
        ("explain --trace folder", 64, "folder: cannot be read: Is a directory"),
        ("plan --params x", 64, "--params 'x' is not a parameter count such as 4e9 or 4B"),
        ("plan --gpus 0", 64, "--gpus"),
        ("costs", 3, "no guard has run there yet"),
        ("costs nosuch", 64, "costs takes `estimate`, `known` or `presets`, not 'nosuch'"),
        (
            "costs estimate op --every 10 --seconds 1",
            64,
            "the guard has not measured a step time yet; pass --step-time SECONDS",
        ),
        ("report -o x.html", 1, "does not exist"),
        ("report -o x.html --since foo", 64, "--since: 'foo' is not a time"),
        ("report --bundle -o x.tar.gz", 1, "does not exist"),
        ("report --export foo -o out", 64, "--export takes tensorboard or wandb, not 'foo'"),
        ("report --export tensorboard -o out", 1, "does not exist"),
        ("doctor --alerts", 64, "no targets; set MINER_GUARD_ALERTS__URLS"),
        ("doctor --alerts -c dotenv.toml", 64, "no targets, and the key file .env cannot be read"),
        ("init --dir new --force -- true", 64, "No such option"),
        ("init --dir new -x -- true", 64, "No such option"),
        ("init --dir file -- true", 1, "file cannot be written"),
        ("init -c bad.toml -- true", 1, "bad.toml already exists; nothing was written"),
        ("demo --fault foo", 64, "fault 'foo' is not of the form KIND@STEP"),
        ("demo --fault slow@300", 64, "fault 'slow@300' never fires: the demo has only 90 steps"),
        (
            "demo --ranks 2 --fault slow@3:9",
            64,
            "fault 'slow@3:9' never fires: the ranks are 0 to 1",
        ),
    ],
)
def test_a_wrong_command_line_is_refused(
    line: str, code: int, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert run(shlex.split(line)) == code
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
