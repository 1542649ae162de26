"""The page's document: what it says of a record, whatever the record holds; and what a file of it
may load."""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import subprocess
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.screen import incident_lines
from miner_guard.config import GateSettings
from miner_guard.record.store import RunReader, event_row
from miner_guard.show.page import document, html, render
from miner_guard.show.series import Window, thinned
from miner_guard.state_dir import STATE_DIR, StateDir
from miner_guard.system.clock import iso_utc
from miner_guard.watch.incident import latest, subject
from miner_guard.watch.state_words import FIND_THE_GUARD
from tests.support.guard_log import Log
from tests.support.present_state import write_status

GATE = GateSettings()


def shown(state: StateDir, window: Window | None = None) -> dict[str, Any]:
    """The document, as it arrives in a browser."""
    page: dict[str, Any] = json.loads(json.dumps(document(state, GATE, window), allow_nan=False))
    return page


def curve(page: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = (each for each in page["curves"] if each["title"] == title)
    return dict(found)


def tiles(page: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {tile["name"]: (tile["value"], tile["kind"], tile["note"]) for tile in page["tiles"]}


def test_an_empty_state_directory_gives_a_page(tmp_path: Path) -> None:
    page = shown(StateDir(tmp_path))
    assert page["state"]["cause"] == "no guard has run here yet"
    assert (page["about"]["first"], page["tiles"], page["alarms"]) == (None, [], [])
    assert page["curves"] == []


def test_a_file_holds_its_data_and_may_load_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.say("incident", label="x", cause="</script><script>alert(1)</script>", fix="y")
    text = render(log.state)
    embedded = text.partition('<script type="application/json" id="data">')[2]
    data = json.loads(embedded.partition("</script>")[0])
    assert "<script>alert" in data["alarms"][0]["text"].replace("[…]", "<")
    assert text.count("<script") == 3
    assert "default-src 'none'; script-src 'sha256-" in text
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    assert "{{" not in text.replace(embedded, "")


def test_the_live_page_has_the_words_for_a_port_that_does_not_answer() -> None:
    """The script shows them when nothing can be fetched anymore, so they are part of the page."""
    assert escape(FIND_THE_GUARD) in html(None)


def test_a_run_with_slow_steps_a_restart_and_uploads(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(1, 61):
        log.step(number, loss=5.0 - number / 30)
        if number % 10 == 0:
            log.snapshot(age=number)
    log.say("slow_step", step_time_s=245.7, inner_step=61)
    log.say("upload_blocked", reason="15 < 50", outer_step=1, inner_step=15)
    log.say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="crash")
    for tag in ("1.1.51", "1.1.54", "1.1.57"):
        log.say("upload_succeeded", tag=tag, detail="read back")
    log.say("incident", label="cuda_oom", cause="out of memory", fix="smaller batch", excerpt="x")
    write_status(log.state.root, {"restarts": 1})
    page = shown(log.state)
    times, losses, smoothed = curve(page, "Loss")["columns"]
    assert (len(times), losses[0], losses[-1]) == (60, pytest.approx(4.9667), 3.0)
    assert smoothed[0] == losses[0]
    assert smoothed[-1] > losses[-1], "a falling loss, smoothed, lags behind"
    (slow,) = curve(page, "Step time")["marks"]
    assert (slow[1], len(slow[2])) == ("slow step", 1)
    assert [len(m[2]) for m in curve(page, "Repo age")["marks"]] == [3, 0]
    assert curve(page, "Repo age")["limit"] == 2000
    assert tiles(page)["restart"][:2] == ("1", "warn")
    assert tiles(page)["uploads verified"][0] == "3"
    assert [row["event"] for row in page["alarms"]] == ["incident"]
    assert page["runbook"]["incident"]["action"]
    reached = {row["title"] for row in page["milestones"] if row["reached"]}
    assert {"Inner step reaches 50+", "Uploads regularly", "Loss decreasing"} <= reached
    assert 'No "SLOW STEP" for an hour' not in reached


def test_a_run_that_ends_in_nan_has_no_falling_loss(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(60):
        log.step(number, loss=5.0 - number / 30)
    log.step(60, loss=float("nan"))
    (falls,) = (m for m in shown(log.state)["milestones"] if m["title"] == "Loss decreasing")
    assert falls["reached"] is None


@pytest.mark.parametrize(
    ("steps", "blocked_at", "reached"), [(20, 15, False), (60, 15, True), (60, 55, False)]
)
def test_the_milestone_without_blocks_needs_a_run_beyond_step_50(
    tmp_path: Path, steps: int, blocked_at: int, reached: bool
) -> None:
    log = Log(tmp_path)
    for number in range(1, steps + 1):
        log.step(number, loss=5.0)
    level = "info" if blocked_at < 50 else "warning"
    log.say("upload_blocked", level, reason="why", outer_step=1, inner_step=blocked_at)
    rows = [m for m in shown(log.state)["milestones"] if "from inner step 50" in m["title"]]
    assert [row["reached"] is not None for row in rows] == [reached]


def test_strange_values_break_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1, loss=float("nan"))
    log.say("loss_nan", step=1, loss=None)
    log.say("slow_step", step_time_s=1e300, inner_step=1)
    write_status(log.state.root, {"steps": "not a table", "uploads": None})
    page = shown(log.state)
    assert "Loss" not in [each["title"] for each in page["curves"]]
    assert len(page["outages"]["NaN"]) == 1


def test_outages_reach_to_the_next_step_and_a_block_to_the_next_upload(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.say("loss_nan", step=1, loss=None)
    log.say("upload_blocked", "warning", reason="NaN", outer_step=1, inner_step=1)
    log.step(2)
    log.say("miner_exited", how="code 1", code=1, runtime_s=15.0)
    log.clock.advance(60.0)
    log.step(3)
    log.clock.advance(300.0)
    log.say("hang_detected", detail="rank 1", culprits=[1], idle_s=300.0, limit_s=300.0)
    log.say("upload_succeeded", tag="1.1.1", detail="read back")
    spans = shown(log.state)["outages"]
    lengths = {kind: [round(end - start) for start, end in each] for kind, each in spans.items()}
    assert lengths == {"hang": [300], "restart": [75], "NaN": [15], "blocked by the gate": [390]}


def test_a_curve_keeps_its_extremes_and_breaks_where_nothing_was_measured() -> None:
    rows = [(float(n), 9.0 if n == 5000 else 1.0) for n in range(10_000)]
    times, values = thinned(rows)
    assert len(times) <= 700
    assert (times[-1], max(v for v in values if v is not None)) == (9999.0, 9.0)
    assert None not in values
    late = [(time + 50_000.0, 1.0) for time, _ in rows]
    assert thinned([*rows, *late])[1].count(None) == 1
    assert thinned(rows[:10], breaks=[4.5])[1] == [1.0] * 5 + [None] + [1.0] * 5


def test_a_first_step_that_compiles_stays_off_the_axis(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.say("miner_started")
    log.step(1, seconds=300.0)
    for number in range(2, 20):
        log.step(number, seconds=15.0)
    assert curve(shown(log.state), "Step time")["top"] == 15.0


def test_a_window_holds_its_own_curves_and_rows(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.say("loss_nan", step=1, loss=None)
    log.clock.advance(7200.0)
    log.step(2)
    now = log.clock.wall()
    page = shown(log.state, Window(now - 3600.0))
    assert len(curve(page, "Loss")["columns"][0]) == 1
    assert (page["alarms"], page["milestones"]) == ([], [])
    assert [row["event"] for row in shown(log.state)["alarms"]] == ["loss_nan"]


def test_a_month_takes_a_second_and_stays_small(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.snapshot(100.0)
    step, snapshot = (event.record() for event in RunReader(log.state.db).events())
    rows = []
    for second in range(0, 30 * 86400, 15):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime(1.8e9 + second))
        rows.append(event_row({**step, "ts": stamp}))
        if second % 120 == 0:
            rows.append(event_row({**snapshot, "ts": stamp}))
    with sqlite3.connect(log.state.db) as db:
        for statement, values in rows:
            db.execute(statement, values)
    start = time.process_time()
    text = render(log.state)
    assert time.process_time() - start < 4, "the target is 1 s on a quiet machine"
    assert len(text) < 400_000


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from miner_guard.cli.main import run

    log = Log(tmp_path / "state")
    log.step(1)
    page = tmp_path / "page.html"
    assert run(["report", "-o", str(page), "--state-dir", str(log.state.root)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert run(["report", "-o", str(page), "--state-dir", str(tmp_path / "none")]) == 1
    assert run(["report", "-o", str(tmp_path / "state"), "--state-dir", str(log.state.root)]) == 1
    assert json.dumps("cannot be written")[1:-1] in capsys.readouterr().err


STEPS = {
    "steps": 900,
    "loss": 3.1,
    "loss_first": 5.2,
    "p50_s": 15.0,
    "p95_s": 16.0,
    "grade": "good",
    "goodput": {"training": 0.9, "hang": 0.08, "init": 0.02},
}


def test_at_most_six_tiles_what_is_wrong_first_and_none_unknown(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    repo = {"age_s": 1850.0, "limit_s": 2000.0, "due": True, "stale": False}
    gpus = {"gpus": {"gpus": [{"state": "ok"}, {"state": "lost"}], "state": "ok"}}
    write_status(log.state.root, {"steps": STEPS, "uploads": {"repo": repo}, "health": gpus})
    page = shown(log.state)
    assert list(tiles(page)) == ["GPUs ok", "repo age", "loss", "step time", "goodput"]
    assert tiles(page)["GPUs ok"] == ("1 of 2", "bad", "")
    assert tiles(page)["repo age"] == ("1850s", "warn", "limit 2000s")
    assert tiles(page)["step time"][2] == "median, 95% within 16 s, good"
    assert tiles(page)["goodput"] == ("90%", "", "hang 8%")
    for name in ("hang_detected", "slow_step", "upload_failed"):
        log.say(name, detail="x")
    assert len(shown(log.state)["tiles"]) == 6


@pytest.mark.parametrize("runs", [True, False, None])
def test_a_guard_that_is_gone_leaves_its_miner_and_its_repo_in_the_headline(
    tmp_path: Path, runs: bool | None
) -> None:
    """The reader must know whether training still goes on, and whether it earns."""
    state = Log(tmp_path).state
    words = {True: "still runs", False: "no longer runs", None: "may still run"}
    miner = subprocess.Popen(["sleep", "60"], env={**os.environ, STATE_DIR: str(state.root)})
    try:
        if runs is False:
            miner.kill()
            miner.wait()
        host = "elsewhere" if runs is None else socket.gethostname()
        verdict = {"life": "training", "earning": "yes", "cause": "training"}
        document = {"state": "running", "verdict": verdict, "pid": miner.pid, "host": host}
        document["uploads"] = {"repo": {"age_s": 1000.0, "limit_s": 2000.0}}
        write_status(state.root, document, age_s=1200)
        page = shown(state)
    finally:
        miner.kill()
        miner.wait()
    assert not page["live"], "the first screen must not show healthy figures below GUARD GONE"
    assert page["title"].startswith("GUARD GONE")
    last = f"nothing for 20 min; its last state was EARNING; its miner (pid {miner.pid}) "
    assert f"{last}{words[runs]}" in page["state"]["cause"]
    assert page["state"]["earning"] == "no: the files last seen in the repo are 37 min old"


def test_a_block_below_the_minimum_inner_step_is_no_problem(tmp_path: Path) -> None:
    """The page of a healthy miner must not read "uploads blocked 34"."""
    log = Log(tmp_path)
    for inner in (10, 20, 30, 60):
        level = "info" if inner < 50 else "warning"
        log.say("upload_blocked", level, reason="why", outer_step=1, inner_step=inner)
    page = shown(log.state)
    assert tiles(page)["upload blocked"][:2] == ("1", "warn")
    assert [row["count"] for row in page["alarms"]] == [1]


def test_a_crash_loop_is_one_row_with_a_count_and_another_day_another_row(tmp_path: Path) -> None:
    """The first screen must not show fifteen identical rows."""
    log = Log(tmp_path)
    for start in (0, 86_400):
        log.clock.advance(start)
        for code in (1, 2, 3):
            log.clock.advance(60)
            log.say("crash_loop", detail=f"code {code} again")
    assert [row["count"] for row in shown(log.state)["alarms"]] == [3, 3]


def test_of_sixteen_ranks_the_one_behind_then_the_slow_one_are_first(tmp_path: Path) -> None:
    log = Log(tmp_path)
    ranks = {str(rank): {"step_time_s": 15.0, "work_s": 6.0} for rank in range(16)}
    ranks["12"]["work_s"] = 14.5
    ranks["7"] = {"last_step_age_s": 400.0}
    write_status(log.state.root, {"steps": {"per_rank": ranks}})
    rows = shown(log.state)["ranks"]
    marks = [(row["rank"], row["mark"]) for row in rows]
    assert marks[:3] == [("7", "BEHIND"), ("12", "SLOW"), ("0", "")]
    assert rows[0]["work_s"] is None, "unknown is not zero"


@pytest.mark.parametrize(("hours", "words"), [(3, "3 h"), (60, "2.5 days"), (200, "7 days")])
def test_the_week_begins_with_the_record_and_says_how_long_it_is(
    tmp_path: Path, hours: float, words: str
) -> None:
    """The page must not say "last 7 days" above a three-hour log."""
    log = Log(tmp_path)
    now = log.clock.wall() + 3600 * hours
    changes = [(log.clock.wall(), "green")]
    verdict = {"life": "training", "colour": "green", "changes": changes}
    write_status(log.state.root, {"verdict": verdict, "updated": iso_utc(now)})
    strip = shown(log.state)["week"]
    assert strip["words"] == f"last {words}: well 100%"
    assert set(strip["cells"]) == {"good"}
    assert "the worst state that held for" in strip["how"]


def test_the_states_event_has_its_row_of_the_runbook_on_the_page(tmp_path: Path) -> None:
    """At four in the morning, advice must not need a checkout or a network."""
    log = Log(tmp_path)
    verdict = {"life": "training", "colour": "red", "cause": "loss is NaN", "event": "loss_nan"}
    write_status(log.state.root, {"verdict": verdict})
    assert list(shown(log.state)["runbook"]) == ["loss_nan"]


def test_a_hang_is_one_incident_with_culprit_frame_collectives_stack_and_cost(
    tmp_path: Path,
) -> None:
    """The hang's evidence once occurred nowhere on the page."""
    log = Log(tmp_path)
    log.step(1)
    log.clock.advance(45.0)
    folder = log.state.incidents / "20260102T030405-hang"
    folder.mkdir(parents=True)
    (folder / "stacks-rank-0001.txt").write_text("Thread 1\n  next_batch (train.py:212)\n")
    late = "rank 1 is at collective 1060, rank 0 waits in collective 1061 (all_reduce)"
    log.say("stack_dump", detail=f"ranks 0,1; {late}", path=str(folder), ranks=[0, 1])
    told = {"culprits": [1], "frames": {"1": "train.py:212"}, "idle_s": 45.0, "limit_s": 40.0}
    log.say("hang_detected", detail="rank 1 in data for 45s", **told)
    log.say("upload_blocked", "warning", reason="no step", outer_step=1, inner_step=60)
    log.say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="hang")
    open_card = shown(log.state)["incident"]
    first, cost, evidence = incident_lines(latest(RunReader(log.state.db)))
    assert first == "incident HANG DETECTED: rank 1 in data for 45s", "status says it too"
    assert cost.endswith("Z: noticed after 45 s, 1 upload late")
    assert evidence.startswith("         evidence: train.py:212; rank 1 is at collective 1060")
    assert (open_card["over"], open_card["culprits"]) == (None, [1])
    log.step(2, seconds=7.0)
    log.say("incident", label="x", cause="y", fix="z")
    log.clock.advance(600.0)
    assert shown(log.state)["incident"]["event"] == "incident", "a step is between them"
    assert open_card["frame"] == "train.py:212"
    assert open_card["collective"].startswith("rank 1 is at collective 1060, rank 0 waits")
    assert "next_batch (train.py:212)" in open_card["stack"]
    assert open_card["uploads_late"] == 1
    assert open_card["sentence"].endswith("Noticed after 45 s, 1 upload late.")
    assert any(line.startswith("MINER RESTARTING") for line in open_card["guard"])
    assert [moment["event"] for moment in open_card["timeline"]][-2:] == [
        "upload_blocked",
        "miner_restarting",
    ]


def test_fast_steps_before_a_hang_do_not_crowd_out_what_follows_it(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for step in range(1, 500):
        log.step(step, seconds=0.1)
    log.say("hang_detected", detail="rank 1 in data for 45s", culprits=[1], idle_s=5.0)
    log.say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="hang")
    card = shown(log.state)["incident"]
    assert [moment["event"] for moment in card["timeline"]] == ["hang_detected", "miner_restarting"]
    assert any(line.startswith("MINER RESTARTING") for line in card["guard"])


def test_an_incident_without_a_known_cause_shows_what_was_seen() -> None:
    line = (
        "INCIDENT code_bug: An error that matches no known fault. (on rank 1) Seen: KeyError: 'x'"
    )
    assert subject(f"{line} Fix: Read the traceback.") == "INCIDENT code_bug: KeyError: 'x'"
    assert (
        subject("INCIDENT cuda_oom: Too little. Seen: x Fix: y.") == "INCIDENT cuda_oom: Too little"
    )


def test_a_nan_is_over_with_the_first_finite_loss(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.say("loss_nan", step=1)
    for loss in (float("nan"), float("nan"), 3.0):
        log.step(1, loss=loss)
    card = shown(log.state)["incident"]
    assert card["over"] - card["start"] == pytest.approx(45.0)


def test_an_incident_is_over_with_the_next_step(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.say("incident", label="cuda_oom", cause="y", fix="Halve the batch")
    log.clock.advance(60.0)
    log.say("crash_loop", detail="again")
    log.step(2, seconds=30.0)
    card = shown(log.state)["incident"]
    assert (card["event"], card["fix"]) == ("incident", "Halve the batch"), "one chain"
    assert card["over"] - card["start"] == pytest.approx(90.0)
    assert "training again after 90 s" in card["sentence"]
