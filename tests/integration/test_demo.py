"""A complete `miner-guard demo`: a newcomer's first run, with a crash and a slow step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.demo import start_fresh
from miner_guard.demo import faults
from miner_guard.demo.summary import lines
from miner_guard.exits import Refused
from miner_guard.state_dir import StateDir
from tests.support import requires
from tests.support.event_names import events as logged_events

CRASH, SLOW, STEPS, EVERY = 23, 45, 62, 20


@dataclass(frozen=True)
class Run:
    code: int
    output: str
    state: StateDir
    records: list[Mapping[str, Any]]

    def named(self, event: str) -> list[Mapping[str, Any]]:
        return [r for r in self.records if r["event"] == event]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    requires.module("torch")
    state = StateDir(tmp_path_factory.mktemp("demo") / "state")
    faults_of_it = ["--fault", f"crash@{CRASH}:1", "--fault", f"slow@{SLOW}:1"]
    program = [sys.executable, "-c", "from miner_guard.cli.main import main; main()"]
    command = [*program, "demo", "--steps", str(STEPS), *faults_of_it]
    env = {**os.environ, "MINER_GUARD_STATE_DIR": str(state.root)}
    ended = subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
        cwd=state.root.parent,
    )
    records = [json.loads(line) for line in state.log.read_text().splitlines()]
    return Run(ended.returncode, ended.stdout.decode(), state, records)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def test_it_ends_by_itself_with_a_summary(run: Run) -> None:
    assert run.code == 0, run.output[-3000:]
    tail = run.output[run.output.index("DEMO SUMMARY") :]
    for what in (
        "state       FINISHED at",
        "steps ",
        "loss        from",
        "step time   p50",
        "uploads     blocked",
        "guard cost  in the ranks",
    ):
        assert what in tail
    # The demo's own label alone, before the cells.
    assert re.search(r"^strip {7}[█▅▁░ ]+  last ", tail, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        "GPU DIAGNOSTICS",
        "Step Time",
        "UPLOAD BLOCKED: inner_step (15) < minimum (50). Validators will reject this! "
        "Waiting for more training steps...",
        "Successfully pushed",
        "Outer Step:",
        "SLOW STEP",
        "HEALTH ",
    ],
)
def test_the_documents_greps_find_what_they_should(run: Run, words: str) -> None:
    assert words in run.output


def test_early_uploads_are_blocked_and_later_ones_published_and_verified(run: Run) -> None:
    assert all(r["inner_step"] < 50 for r in run.named("upload_blocked"))
    verified = run.named("upload_succeeded")
    assert verified
    assert all(int(r["tag"].split(".")[2]) >= 50 for r in verified)
    assert not run.named("upload_failed")


def test_the_loss_falls(run: Run) -> None:
    losses = [r["loss"] for r in run.named("inner_step")]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5


def test_a_restart_loses_one_step_at_most(run: Run) -> None:
    saved = run.named("checkpoint")
    (resumed,) = [e for e in saved if e["msg"].startswith("CHECKPOINT RESUMED")]
    assert CRASH - 2 <= resumed["step"] < CRASH
    assert resumed["path"].startswith("/dev/shm")
    seconds = [r["inner_step"] for r in run.named("inner_step")]
    assert seconds.count(resumed["step"] + 1) in (1, 2)
    assert seconds[-1] == STEPS


def test_every_line_parses_and_every_event_has_its_fields(run: Run) -> None:
    for record in run.records:
        assert record["event"] in logged_events()
        assert {"ts", "level", "msg", "run_id", "host", "rank"} <= record.keys()


def test_a_healthy_cpu_run_raises_no_alarm(run: Run) -> None:
    critical = {r["event"] for r in run.records if r["level"] == "critical"}
    assert critical == set(), [r["msg"] for r in run.records if r["level"] == "critical"]


def test_a_fresh_start_clears_a_demo_and_refuses_a_real_miners_files(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.root.mkdir()
    state.log.write_text("a real miner's log\n")
    (state.root / "notes.txt").write_text("not ours")
    with pytest.raises(Refused, match=re.escape("guard.jsonl belongs to a real miner")):
        start_fresh(state)
    assert state.log.read_text() == "a real miner's log\n"
    (state.root / "demo").mkdir()
    start_fresh(state)
    assert not state.log.exists()
    assert (state.root / "notes.txt").read_text() == "not ours"


@pytest.mark.parametrize("text", ["slow", "slow@0", "slow@x", "nonsense@3", "slow@3:"])
def test_an_invalid_fault_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("KIND@STEP")):
        faults.parse(text)


def test_a_fault_fires_once_unless_asked_and_on_its_rank_alone(tmp_path: Path) -> None:
    def plan(rank: int, repeat: bool = False) -> faults.FaultPlan:
        return faults.FaultPlan(
            [faults.parse("crash@5:1"), faults.parse("slow@5")],
            rank=rank,
            world_size=2,
            folder=tmp_path,
            repeat=repeat,
        )

    assert plan(0).at(5) is None
    fired = plan(1)
    assert fired.at(4) is None
    assert fired.at(5) is not None
    assert plan(1).at(5) is None
    assert plan(1, repeat=True).at(5) is not None


def test_a_summary_says_unknown_and_shows_a_loss_that_ends_in_nan() -> None:
    """The summary must not show `from 4.54 to 2.64` after forty steps of NaN."""
    text = "\n".join(lines([], None))
    assert "loss        from unknown to unknown" in text
    assert "in the ranks unknown" in text
    steps = [{"event": "inner_step", "level": "info", "rank": 0, "loss": 4.5}] * 20
    steps += [{"event": "inner_step", "level": "info", "rank": 0, "loss": "NaN"}] * 40
    steps += [{"event": "upload_blocked", "level": "info"}] * 2
    text = "\n".join(lines(steps, None))
    assert "loss        from 4.50 to NaN" in text
    assert "uploads     blocked 2, verified 0" in text
    assert "alarms      none" in text
    text = "\n".join(lines(steps, None, "HANG DETECTED: x. Noticed after 4 s.", "██▁  well 90%"))
    assert "incident    HANG DETECTED: x. Noticed after 4 s.\nstrip       ██▁  well 90%\n" in text
