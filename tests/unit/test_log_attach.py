"""Miners that are known by their lines only, and what `explain --steps` says of such lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from miner_guard.cli.main import run
from miner_guard.rank.layout import FLAG_FIRST
from miner_guard.watch.base import Exit
from miner_guard.watch.output import LogAttachMonitor
from tests.support.contexts import context
from tests.support.output import LoggedMiner

TODAY = (
    "\x1b[34m2025-12-20 10:00:00\x1b[0m |\x1b[1m     INFO     \x1b[0m| \x1b[1mRank 0\x1b[0m | 🏋️  "
)
STEP = TODAY + "Outer Step: {} | Inner Step: {} | Learning Rate: 0.00002100 | Average Loss: 3.40"


@pytest.mark.parametrize(
    ("form", "outer"),
    [
        ("INFO | Index: {n} | Loss: {loss:.2f}", None),
        ("INFO | ⚙️ Inner Step: {n} | Average Loss: {loss:.4f}", None),
        (
            (
                "INFO | 🏋️ Outer Step: 5 | Inner Step: {n} | Learning Rate: 0.00002100 | "
                "Average Loss: {loss:.2f}"
            ),
            5,
        ),
        (
            TODAY
            + (
                "Outer Step: 5 | Inner Step: {n} | Learning Rate: 0.00002100 | Average "
                "Loss: {loss:.2f}"
            ),
            5,
        ),
        ("Outer Step: 5 | Inner Step: {n} | LR: 0.00002100 | Loss: {loss:.2f}", 5),
    ],
)
def test_five_versions_of_the_miners_step_lines(
    tmp_path: Path, form: str, outer: int | None
) -> None:
    log = LoggedMiner(tmp_path, profile="sn38")
    for number in range(3):
        log.line("something else")
        log.line(form.format(n=number, loss=3.5 - number / 4))
    assert [(s.outer_step, s.inner_step, s.loss) for s in log.steps] == [
        (outer, 0, 3.5),
        (outer, 1, 3.25),
        (outer, 2, 3.0),
    ]
    assert [round(s.seconds) for s in log.steps] == [20, 20, 20]
    assert [bool(s.flags & FLAG_FIRST) for s in log.steps] == [True, False, False]


@pytest.mark.parametrize("prefix", ["", "Outer Step: 5 | "])
def test_lines_of_micro_batches_make_one_step(tmp_path: Path, prefix: str) -> None:
    log = LoggedMiner(tmp_path, profile="sn38")
    for number in range(3):
        for micro in (10, 20, 30):
            log.line(
                (
                    f"{prefix}Inner Step: {number} | Average Loss: {4 - number:.4f} | Micro "
                    f"Batches: [{micro}/30]"
                ),
                5,
            )
    assert [(s.inner_step, s.loss, round(s.seconds)) for s in log.steps] == [
        (0, 4.0, 20),
        (1, 3.0, 15),
    ]


def test_the_documents_line_brings_its_own_time_and_memory(tmp_path: Path) -> None:
    log = LoggedMiner(tmp_path)
    log.line(
        (
            "Outer Step: 56 | Inner Step: 84 | LR: 0.00002100 | Loss: 3.40 | Step Time: "
            "245.7s | GPU Mem: 0.05GB"
        ),
        after_s=300,
    )
    (step,) = log.steps
    assert (step.outer_step, step.inner_step, step.lr, step.loss) == (56, 84, 2.1e-5, 3.4)
    assert step.seconds == pytest.approx(245.7)
    assert step.allocated_bytes == pytest.approx(0.05 * 1024**3)


def test_time_between_lines_is_shared_by_the_steps_between_them(tmp_path: Path) -> None:
    log = LoggedMiner(tmp_path)
    log.line("Step 10: loss=2.45")
    log.line("Step 20: loss=2.40", after_s=50)
    assert log.steps[-1].seconds == pytest.approx(5.0)
    now = log.reader.now()
    assert now is not None
    assert now.allowance_s == 250.0, (
        "a program that prints every tenth step is not hanging in between"
    )


def test_lines_that_arrive_together_share_the_time_between_them(tmp_path: Path) -> None:
    """The keeper passes a second's lines on at once: the steps of a fast miner once took 0 s."""
    log = LoggedMiner(tmp_path)
    for turn in range(5):
        log.line("\n".join(f"iter {10 * turn + n}: loss 2.0" for n in range(10)), 1.0)
    assert [round(step.seconds, 3) for step in log.steps[1:]] == [0.1] * 49


def test_an_evaluation_that_is_printed_goes_with_the_next_step(tmp_path: Path) -> None:
    log = LoggedMiner(tmp_path)
    log.line("iter 99: loss 2.5, time 10.00ms")
    log.line("step 100: train loss 2.4100, val loss 2.6000")
    log.line("iter 100: loss 2.4, time 10.00ms")
    log.line("Step 101: loss=2.4, val_loss=nan")
    first, second, third = (s.eval_loss for s in log.steps)
    assert (first, second) == (None, 2.6)
    assert third is not None
    assert math.isnan(third)


def test_pushes_become_upload_entries(tmp_path: Path) -> None:
    log = LoggedMiner(tmp_path, profile="sn38")
    log.line("Outer Step: 5 | Inner Step: 7 | Learning Rate: 0.00002100 | Average Loss: 3.40")
    log.line("Successfully pushed new model state with tag 5.5.8 to bucket: llama-4b-ws-4-007")
    log.line("Successfully pushed new model and optimizer state with tag 5 to repo: someone/model")
    log.line("Model state upload failed: 403 Forbidden")
    uploads = [e for _, e in log.reader.entries(0)]
    assert [(u["phase"], u.get("tag"), u.get("error"), u["inner_step"]) for u in uploads] == [
        ("finished", "5.5.8", None, 7),
        ("finished", "5", None, 7),
        ("failed", None, "403 Forbidden", 7),
    ]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("(unclosed", "'(unclosed': missing ), unterminated subpattern"),
        (r"outer (?P<outer_step>\d+) (?P<loss>\S+)", "has no group named `step` or `inner`"),
    ],
)
def test_patterns_of_ones_own_come_first_and_a_bad_one_is_named(
    tmp_path: Path, bad: str, why: str
) -> None:
    own = r"batch (?P<step>\d+) cost (?P<loss>\S+)"
    log = LoggedMiner(tmp_path / "own", log_patterns=(own,))
    log.line("batch 3 cost 0.5 iter 9: loss 1")
    assert [(s.inner_step, s.loss) for s in log.steps] == [(3, 0.5)]
    log = LoggedMiner(tmp_path / "bad", log_patterns=(own, bad))
    log.line("batch 3 cost 0.5 iter 9: loss 1")
    assert [(s.inner_step, s.loss) for s in log.steps] == [(9, 1.0)], "the known forms still count"
    assert why in str(log.events[0].fields["what"])


def test_an_allreduce_is_neither_a_hang_nor_a_slow_step(tmp_path: Path) -> None:
    """Otherwise a healthy miner would be ended in the middle of each AllReduce that is longer than
    `[hang] min_s`."""
    log = LoggedMiner(tmp_path, profile="sn38")
    log.line(STEP.format(5, 80))
    log.line(TODAY + "Received Main All Reduce Call")
    now = log.reader.now()
    assert now is not None
    assert (now.phase, now.phase_since, now.allowance_s) == (
        "allreduce",
        log.clock.monotonic(),
        None,
    )
    log.line(STEP.format(6, 1), 700)
    log.line(STEP.format(6, 2), 10)
    now = log.reader.now()
    assert now is not None
    assert (now.phase, now.allowance_s) == ("", 50.0), (
        "nor is an hour allowed to the steps after it"
    )
    assert [dict(s.phases) for s in log.steps] == [{}, {"allreduce": 700.0}, {}]


def test_the_record_ends_with_the_launch_and_does_nothing_unless_asked(tmp_path: Path) -> None:
    log = LoggedMiner(tmp_path)
    log.line("iter 1: loss 2.0")
    list(log.monitor.on_exit(Exit(0, None, False, False, 1.0)))
    log.line("iter 2: loss 2.0")
    now = log.reader.now()
    assert now is not None
    assert (now.state, now.inner_step) == ("closed", 1)
    assert LogAttachMonitor(context(tmp_path / "other")).snapshot() == {"active": False}


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
