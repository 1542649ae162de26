"""`explain --steps` shows what `--attach log` would read from a log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miner_guard.cli.main import run

LOG = """loading the model
step 10 done
iter 100: loss 2.4512, time 250.12ms
iter 110: loss 2.4012, time 250.12ms
step 110: train loss 2.1, val loss 3.2
Successfully pushed new model state with tag 5.5.8 to bucket: x
"""


@pytest.fixture(autouse=True)
def _log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text(LOG)


def test_steps_and_near_misses_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--steps", "a.log"]) == 0
    out = capsys.readouterr().out
    assert "line 3, step 100, loss 2.4512, seconds 0.25012" in out
    assert "2 steps in 6 lines: loss on 2, seconds on 2, lr on 0" in out
    assert "line 2: 'step 10 done': it has a step number" in out
    assert run(["explain", "--steps", "a.log", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(s["step"], s["loss"]) for s in document["steps"]] == [(100, 2.4512), (110, 2.4012)]
    assert document["nearest_misses"][0]["line"] == 2


def test_no_step_is_exit_1_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.log").write_text("batch 3 cost 0.5\n")
    assert run(["explain", "--steps", "a.log"]) == 1
    assert "[miner] log_patterns" in capsys.readouterr().out
    pattern = r"batch (?P<step>\d+) cost (?P<loss>\S+)"
    Path("guard.toml").write_text(f"[miner]\nlog_patterns = ['{pattern}']\n")
    assert run(["explain", "--steps", "a.log"]) == 0
    assert "step 3, loss 0.5" in capsys.readouterr().out


def test_a_bad_pattern_or_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A typo in guard.toml must not cause `internal error`."""
    assert run(["explain", "--steps", "b.log"]) == 64
    assert "b.log: cannot be read" in capsys.readouterr().err
    for bad, why in (("(", "missing )"), ("cost (?P<loss>.)", "it has no group named `step`")):
        Path("guard.toml").write_text(f"[miner]\nlog_patterns = ['{bad}']\n")
        assert run(["explain", "--steps", "a.log"]) == 78
        assert f"[miner] log_patterns: '{bad}': {why}" in capsys.readouterr().err.replace("\n", " ")
