"""The report: one self-contained page, whatever the log holds; a week of log takes seconds and
megabytes."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from miner_guard.record.store import RunReader, event_row
from miner_guard.show.data import LogReader, gather
from miner_guard.show.report import render
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import iso_utc
from miner_guard.watch.state_words import StateWeek
from tests.support.guard_log import Log
from tests.support.present_state import write_status


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [
            f"{k}={v}"
            for k, v in attrs
            if k == "src" or "http" in (v or "") or (k == "href" and not (v or "").startswith("#"))
        ]
        if tag not in ("meta", "path", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag


def _checked(page: str) -> str:
    assert """http-equiv="Content-Security-Policy" content="default-src 'none'""" in page
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.outside == [], "the page must stand alone"
    return page


def test_an_empty_state_directory_gives_a_page_that_reports_it(tmp_path: Path) -> None:
    page = _checked(render(StateDir(tmp_path)))
    assert "no events in the log yet" in page
    assert "unknown" in page


def test_the_page_shows_slow_steps_restarts_uploads_and_milestones(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(1, 61):
        log.step(number, loss=5.0 - number / 30)
        if number % 10 == 0:
            log.snapshot(age=number)
    log.say(
        "slow_step",
        step_time_s=245.7,
        expected="10-30s",
        inner_step=61,
        limit_s=60,
        rule="absolute",
    )
    log.say(
        "upload_blocked",
        reason="15 < 50",
        outer_step=1,
        inner_step=15,
        kind="gradient",
        verdicts=[],
    )
    log.say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="crash")
    for tag in ("1.1.51", "1.1.54", "1.1.57"):
        log.say("upload_succeeded", tag=tag, detail="read back")
    log.say("incident", label="cuda_oom", cause="<out of memory>", fix="smaller batch", excerpt="x")
    page = _checked(render(log.state))
    for words in (
        "slow step",
        "restart",
        "verified",
        "blocked",
        "UPLOAD SUCCEEDED: 1.1.57, read back",
        "limit 2000",
    ):
        assert words in page
    assert "&lt;out of memory&gt;" in page
    reached = re.findall(r"<td>([^<]*)</td><td class=\"state good\">reached", page)
    assert "Inner step reaches 50+" in reached
    assert "Uploads regularly" in reached
    assert "Loss decreasing over time" in reached
    assert re.search(r"Rank &lt; 15</td><td class=\"state \">unknown", page)


@pytest.mark.parametrize(
    ("steps", "blocked_at", "reached"), [(20, 15, False), (60, 15, True), (60, 55, False)]
)
def test_the_milestone_without_blocks_needs_a_run_beyond_step_50(
    tmp_path: Path, steps: int, blocked_at: int, reached: bool
) -> None:
    log = Log(tmp_path)
    for number in range(1, steps + 1):
        log.step(number, loss=5.0)
    log.say(
        "upload_blocked",
        reason="why",
        outer_step=1,
        inner_step=blocked_at,
        kind="gradient",
        verdicts=[],
    )
    done = re.findall(r"<td>([^<]*)</td><td class=\"state good\">reached", render(log.state))
    assert any("from inner step 50 on" in title for title in done) == reached


def test_the_incentive_is_unknown_unless_the_chain_reports_it(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    score = '<b class="">{}</b><span>incentive</span>'
    assert score.format("unknown") in render(log.state)
    write_status(log.state.root, {"chain": {"block": 7, "incentive": 0.0123}})
    assert score.format("0.0123") in render(log.state)


def test_strange_values_break_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1, loss=float("nan"))
    log.say("loss_nan", step=1, loss=None)
    log.say(
        "slow_step", step_time_s=1e300, expected="1s", inner_step=1, limit_s=60, rule="absolute"
    )
    write_status(log.state.root, {"steps": "not a table", "uploads": None})
    _checked(render(log.state))


def test_among_very_many_events_the_newest_and_the_first_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plots must not end long before the run does, and a milestone must not keep moving
    later."""
    monkeypatch.setattr("miner_guard.show.data._KEPT", 10)
    log = Log(tmp_path)
    for number in range(100):
        log.clock.advance(1.0)
        log.say(
            "slow_step",
            step_time_s=number,
            expected="1s",
            inner_step=number,
            limit_s=60,
            rule="absolute",
        )
    log.say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="crash")
    data = gather(log.state)
    shown = [mark.fields["inner_step"] for mark in data.of("slow_step")]
    assert shown[0] == 0
    assert shown[1:] == list(range(101 - len(shown), 100))
    assert 10 < len(shown) <= 21
    assert (len(data.of("miner_restarting")), data.counts["slow_step"]) == (1, 100)


def test_a_week_of_data_takes_seconds_and_stays_small(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.snapshot(100.0)
    step, snapshot = (event.record() for event in RunReader(log.state.db).events())
    with sqlite3.connect(log.state.db) as db:
        for second in range(0, 7 * 86400, 15):
            stamp = time.strftime("2026-01-%dT%H:%M:%S.000000Z", time.gmtime(86400 + second))
            db.execute(*event_row({**step, "ts": stamp}))
            if second % 60 == 0:
                db.execute(*event_row({**snapshot, "ts": stamp}))
    start = time.process_time()
    page = _checked(render(log.state))
    assert time.process_time() - start < 10, "the target is 5 s on a quiet machine"
    assert len(page) < 5_000_000


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


def test_a_live_report_reads_only_what_was_written_since(tmp_path: Path) -> None:
    """The page must not parse a week of events at every refresh, nor lose or count one twice."""
    log = Log(tmp_path)
    for number in range(50):
        log.step(number)
    reader = LogReader(log.state)
    assert reader.refresh().counts["inner_step"] == 50
    log.step(50, loss=2.5)
    later = Log(tmp_path)
    later.clock = log.clock
    later.step(51, loss=2.25)
    data = reader.refresh()
    assert data.counts["inner_step"] == 52
    assert list(data.loss.values[-2:]) == [2.5, 2.25]
    assert reader.refresh().counts["inner_step"] == 52


def test_a_window_holds_its_own_marks_and_counts(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.say("loss_nan", step=1, loss=None)
    log.clock.advance(7200.0)
    log.step(2)
    data = gather(log.state)
    assert data.last is not None
    recent = data.window(data.last - 3600.0, data.last)
    assert recent.first is not None
    assert len(recent.loss.window(recent.first, data.last)) == 1
    assert (data.of("loss_nan") != [], recent.of("loss_nan")) == (True, [])


def test_an_outage_is_a_band_from_the_exit_to_the_next_step(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.say("miner_exited", how="code 1", code=1, runtime_s=15.0)
    log.clock.advance(60.0)
    log.step(2)
    page = _checked(render(log.state))
    assert 'class="band restart"' in page


def test_hang_nan_and_blocked_are_bands_with_a_legend(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    log.say("loss_nan", step=1, loss=None)
    log.say("upload_blocked", reason="NaN", outer_step=1, inner_step=1, kind="x", verdicts=[])
    log.step(2)
    log.clock.advance(300.0)
    log.say("hang_detected", detail="rank 1", culprits=[1], idle_s=300.0, limit_s=300.0)
    log.snapshot(100.0)
    page = _checked(render(log.state))
    for kind, words in (("hang", "hang"), ("nan", "NaN"), ("blocked", "blocked by the gate")):
        assert f'class="band {kind}"' in page
        assert f'class="key bands {kind}">{words}' in page


def test_of_sixteen_ranks_the_slow_one_is_the_first_row(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    ranks = {
        str(rank): {"step_time_s": 15.0, "work_s": 14.5 if rank == 12 else 6.0}
        for rank in range(16)
    }
    write_status(log.state.root, {"steps": {"per_rank": ranks}})
    rows = re.findall(r"<tr><td>(\d+)</td>", _checked(render(log.state)))
    assert rows[0] == "12"


def test_a_week_of_states_is_a_strip_and_its_shares_are_reported(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    now = log.clock.wall()
    week = StateWeek({})
    week.add("green", now - 7200, now - 1800)
    week.add("red", now - 1800, now)
    verdict = {"life": "hung", "colour": "red", "cause": "x", "week": week.to_json()}
    write_status(log.state.root, {"verdict": verdict, "updated": iso_utc(now)})
    page = _checked(render(log.state))
    assert "last 2 h: well 75%, failing 25%" in page
    assert page.count(' UTC: failing"></i>') == 1


def test_a_crash_loop_is_one_row_with_a_count_and_another_day_another_row(tmp_path: Path) -> None:
    """The first screen must not show fifteen identical rows."""
    log = Log(tmp_path)
    for start in (0, 86_400):
        log.clock.advance(start)
        for code in (1, 2, 3):
            log.clock.advance(60)
            how = f"code {code} without being asked"
            log.say("miner_exited", how=how, code=code, runtime_s=61.0)
    page = _checked(render(log.state))
    assert page.count("<small>3 times since ") == 2
    assert page.count("MINER EXITED: code") == 2


def test_a_link_of_the_state_leads_to_its_runbook_row_on_the_same_page(tmp_path: Path) -> None:
    """At four in the morning, advice must not need a checkout or a network."""
    log = Log(tmp_path)
    log.step(1)
    verdict = {"life": "training", "colour": "red", "cause": "loss is NaN", "event": "loss_nan"}
    write_status(log.state.root, {"verdict": verdict})
    page = _checked(render(log.state))
    assert '<a href="#runbook-loss_nan">loss_nan</a>' in page
    targets = re.findall(r'href="#([^"]+)"', page)
    assert all(f'id="{target}"' in page for target in targets), targets


def test_a_machine_without_a_gpu_is_named_so(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    absent = {"gpus": [], "state": "absent", "reason": "NVML Shared Library Not Found"}
    write_status(log.state.root, {"health": {"gpus": absent}})
    assert "no GPU: this machine has no NVIDIA driver (NVML Shared" in render(log.state)


def test_shares_of_a_breakdown_sum_to_100_and_no_trace_reads_0(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    shares = {"training": 0.6649, "upload": 0.3326, "hang": 0.0025}
    write_status(log.state.root, {"steps": {"goodput": shares}})
    page = render(log.state)
    assert ["training 66%" in page, "upload 33%" in page, "hang &lt;1%" in page] == [True] * 3


def test_a_ranks_unknown_work_is_unknown_and_not_zero(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    write_status(log.state.root, {"steps": {"per_rank": {"0": {"step_time_s": 15.0}}}})
    page = render(log.state)
    assert re.search(r"<td>0</td><td class=\"n \">unknown</td>", page)


def test_a_run_that_ended_on_request_has_no_problem(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    verdict = {"life": "finished", "colour": "grey", "cause": "the miner finished its work"}
    write_status(log.state.root, {"state": "done", "verdict": verdict})
    page = render(log.state)
    assert "<dt>Why</dt><dd>the miner finished its work" in page
    assert 'class="verdict idle"' in page


def test_a_silent_guard_is_gone_on_the_page_and_its_last_state_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    verdict = {"life": "training", "earning": "yes", "cause": "training"}
    write_status(log.state.root, {"state": "running", "verdict": verdict}, age_s=600)
    page = _checked(render(log.state))
    assert "it has written nothing for 10 min; its last state was EARNING" in page
    assert "<h1>GUARD GONE" in page
    assert "miner guard gone" in page
