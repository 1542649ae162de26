"""The report: one page that stands alone, whatever the log holds; a week of it within seconds and
megabytes."""

from __future__ import annotations

import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import LogSettings
from miner_guard.detectors.verdict_history import VerdictWeek
from miner_guard.eventlog import catalog
from miner_guard.eventlog.emitter import Emitter
from miner_guard.eventlog.jsonl import JsonlSink
from miner_guard.eventlog.redact import Redactor
from miner_guard.reporting.report import render
from miner_guard.reporting.report_data import LogReader, Smoother, gather
from miner_guard.reporting.report_svg import Line, Plot, draw, nice_ticks, thinned
from miner_guard.reporting.time_series import TimeSeries
from miner_guard.state_dir import StateDir, write_json
from miner_guard.system.clock import FakeClock, iso_utc


class Log:
    """Writes a state directory as a guard would."""

    def __init__(self, root: Path) -> None:
        self.state, self.clock = StateDir(root), FakeClock()
        self._emitter = Emitter(
            self.clock, "r1", Redactor(), [JsonlSink(self.state.log, LogSettings())]
        )

    def say(self, event: str, **fields: Any) -> None:
        self._emitter.emit(catalog.make_finding(event, **fields))

    def step(self, inner_step: int, seconds: float = 15.0, loss: float = 3.0) -> None:
        self.clock.advance(seconds)
        self.say(
            "inner_step",
            outer_step=1,
            inner_step=inner_step,
            lr=1e-4,
            loss=loss,
            step_time_s=seconds,
            gpu_mem_gb=18.4,
        )

    def snapshot(self, age: float) -> None:
        gpus = {"gpus": [{"memory_used_bytes": 18 * 1024**3, "utilization_ratio": 0.9}]}
        document = {
            "uploads": {"repo": {"age_s": age}},
            "miner": {"goodput": 0.9},
            "costs": {"share_pct": 0.1},
            "gpus": gpus,
        }
        self.say("health_snapshot", summary="x", snapshot=document)


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
        "UPLOAD VERIFIED: tag 1.1.57",
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
def test_no_block_from_step_50_on_is_reached_only_by_a_run_that_came_so_far(
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
    write_json(log.state.status, {"chain": {"block": 7, "incentive": 0.0123}})
    assert score.format("0.0123") in render(log.state)


def test_unreadable_lines_and_strange_values_break_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1, loss=float("nan"))
    log.say("loss_nan", step=1, loss=None)
    log.say(
        "slow_step", step_time_s=1e300, expected="1s", inner_step=1, limit_s=60, rule="absolute"
    )
    with open(log.state.log, "ab") as file:
        file.write(
            b'\xff torn {"\n{"ts": "when", "level": "info", "event": "inner_step", "msg": ""}\n'
        )
    write_json(log.state.status, {"steps": "not a table", "uploads": None})
    assert "2 unreadable lines" in _checked(render(log.state))


def test_of_very_many_events_the_newest_and_the_first_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a page whose plots end long before the run, and a milestone that is reached
    later each time."""
    monkeypatch.setattr("miner_guard.reporting.report_data._KEPT", 10)
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
    step, snapshot = log.state.log.read_bytes().splitlines(keepends=True)
    week = 7 * 86400
    with open(log.state.log, "wb") as file:
        for second in range(0, week, 15):
            stamp = time.strftime("2026-01-%dT%H:%M:%S", time.gmtime(86400 + second)).encode()
            file.write(step.replace(step[8:27], stamp, 1))
            if second % 60 == 0:
                file.write(snapshot.replace(snapshot[8:27], stamp, 1))
    start = time.process_time()
    page = _checked(render(log.state))
    assert time.process_time() - start < 10, "the target is 5 s on a quiet machine"
    assert len(page) < 5_000_000


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (0, 1e-9), (2.86, 5.5), (-3, 1e9), (5, 5), (0, 245.7)]
)
def test_ticks_enclose_what_they_measure(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 7


def test_thinning_keeps_extremes_and_breaks_at_gaps() -> None:
    times = [float(t) for t in range(10_000) if not 4000 <= t < 6000]
    values = [1.0] * len(times)
    values[1234] = 99.0
    points = thinned(list(zip(times, values, strict=True)), (0.0, 10_000.0))
    assert (1234.0, 99.0) in points
    assert points.count(None) == 1
    assert len(points) < 1500


def test_a_line_does_not_continue_across_a_restart() -> None:
    pairs = [(time, 5.0) for time in (1.0, 2.0, 3.0, 4.0)]
    points = thinned(pairs, (1.0, 4.0), breaks=[2.5])
    assert points == [(1.0, 5.0), (2.0, 5.0), None, (3.0, 5.0), (4.0, 5.0)]


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
    """Guards against a page that parses a week of log at every look, and against lines lost or
    counted twice over a rotation."""
    log = Log(tmp_path)
    for number in range(50):
        log.step(number)
    reader = LogReader(log.state)
    assert reader.refresh().counts["inner_step"] == 50
    log.step(50, loss=2.5)
    log.state.log.rename(log.state.log.with_name("guard.jsonl.1"))
    later = Log(tmp_path)
    later.clock = log.clock
    later.step(51, loss=2.25)
    data = reader.refresh()
    assert data.counts["inner_step"] == 52
    assert list(data.loss.values[-2:]) == [2.5, 2.25]
    assert reader.refresh().counts["inner_step"] == 52
    reader.close()


def _series(points: int, monkeypatch: pytest.MonkeyPatch, kept: int = 1000) -> TimeSeries:
    monkeypatch.setattr("miner_guard.reporting.time_series._MAX_POINTS", kept)
    series = TimeSeries()
    for number in range(points):
        series.add(float(number), 100.0 if number == 77 else -100.0 if number == 99 else 1.0)
    return series


def test_an_old_series_loses_no_extreme_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    series = _series(50_000, monkeypatch)
    assert len(series.times) <= 1000
    points = series.window(0.0, 50_000.0)
    assert {(77.0, 100.0), (99.0, -100.0)} <= set(points)
    assert points == sorted(points)
    assert len(points) < 7000
    assert points[-1][0] >= 49_983
    assert series.first == (0.0, 1.0)


def test_a_short_window_of_a_long_series_has_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    series = _series(50_000, monkeypatch, kept=100_000)
    assert [time for time, _ in series.window(400.0, 409.0)] == [float(t) for t in range(400, 410)]


def test_the_first_time_is_exact_although_most_values_are_thinned() -> None:
    series = TimeSeries()
    for number in range(10_000):
        series.add(float(number), float(number % 100))
    assert series.first_time(lambda value: value >= 50) == 50.0
    assert series.first_time(lambda value: value > 1000) is None


def test_the_first_step_does_not_flatten_the_others() -> None:
    series = TimeSeries()
    for number, seconds in enumerate([122.0, *[15.0] * 50]):
        series.add(float(number), seconds)
    page = draw(Plot("Step time", "s", [Line("step time", series)], off_axis=[0.0]), 0.0, 50.0)
    assert 'data-high="15"' in page
    assert "first step up to 122, off the axis" in page


def test_a_limit_outside_the_axis_is_labelled_and_not_drawn() -> None:
    series = TimeSeries()
    series.add(0.0, 5.0)
    series.add(9.0, 6.0)
    page = draw(Plot("Repo age", "s", [Line("repo age", series)], limit=2000.0), 0.0, 9.0)
    assert "limit 2000 (above this axis)" in page
    assert 'class="limit"' not in page


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
    write_json(log.state.status, {"steps": {"per_rank": ranks}})
    rows = re.findall(r"<tr><td>(\d+)</td>", _checked(render(log.state)))
    assert rows[0] == "12"


def test_a_week_of_verdicts_is_a_strip_and_its_shares_are_reported(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    now = log.clock.wall()
    week = VerdictWeek({})
    week.add("earning", now - 7200, now - 1800)
    week.add("not earning", now - 1800, now)
    verdict = {"state": "not earning", "cause": "x", "week": week.to_json()}
    write_json(log.state.status, {"verdict": verdict, "updated": iso_utc(now)})
    page = _checked(render(log.state))
    assert "last 2 h: earning 75%, not earning 25%" in page
    assert page.count(' UTC: not earning"></i>') == 1


def test_a_crash_loop_is_one_row_with_a_count_and_another_day_another_row(tmp_path: Path) -> None:
    """Guards against a first screen of fifteen equal rows."""
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


def test_a_link_of_the_verdict_leads_to_its_runbook_row_on_the_same_page(tmp_path: Path) -> None:
    """Guards against advice that needs a checkout or a network at four in the morning."""
    log = Log(tmp_path)
    log.step(1)
    verdict = {"state": "not earning", "cause": "loss is NaN", "event": "loss_nan"}
    write_json(log.state.status, {"verdict": verdict})
    page = _checked(render(log.state))
    assert '<a href="#runbook-loss_nan">loss_nan</a>' in page
    targets = re.findall(r'href="#([^"]+)"', page)
    assert all(f'id="{target}"' in page for target in targets), targets


def test_a_machine_without_a_gpu_is_named_so(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    absent = {"gpus": [], "state": "absent", "reason": "NVML Shared Library Not Found"}
    write_json(log.state.status, {"health": {"gpus": absent}})
    assert "no GPU: this machine has no NVIDIA driver (NVML Shared" in render(log.state)


def test_shares_of_a_breakdown_sum_to_100_and_no_trace_reads_0(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    shares = {"training": 0.6649, "upload": 0.3326, "hang": 0.0025}
    write_json(log.state.status, {"steps": {"goodput": shares}})
    page = render(log.state)
    assert ["training 66%" in page, "upload 33%" in page, "hang &lt;1%" in page] == [True] * 3


def test_a_ranks_unknown_work_is_unknown_and_not_zero(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    write_json(log.state.status, {"steps": {"per_rank": {"0": {"step_time_s": 15.0}}}})
    page = render(log.state)
    assert re.search(r"<td>0</td><td class=\"n \">unknown</td>", page)


def test_the_smoothed_loss_does_not_hang_on_the_first_value() -> None:
    smoother = Smoother()
    means = [smoother.add(value) for value in (6.0, 3.0, 3.0, 3.0)]
    assert means[0] == 6.0
    assert means[1] == pytest.approx(4.45, abs=0.05), "of two values about their mean"


def test_a_run_that_ended_on_request_has_no_problem(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step(1)
    verdict = {"state": "stopped", "cause": "the miner finished its work", "key": "finished"}
    write_json(log.state.status, {"state": "done", "verdict": verdict})
    page = render(log.state)
    assert "<dt>What happened</dt><dd>the miner finished its work" in page
    assert 'class="verdict "' in page


def test_a_silent_guard_is_unknown_on_the_page_and_its_last_verdict_is_named(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path)
    log.step(1)
    verdict = {"state": "earning", "cause": "training"}
    write_json(log.state.status, {"state": "running", "verdict": verdict})
    old = time.time() - 600
    os.utime(log.state.status, (old, old))
    page = _checked(render(log.state))
    assert "the guard has written nothing for 10 min; its last verdict was earning" in page
    assert "<h1>UNKNOWN" in page
    assert "miner unknown (running when the guard last wrote, 10 min ago)" in page
