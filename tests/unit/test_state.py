"""One judgement of the run: life, health, earning and the next step."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import COMMANDS
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import RunState, StatusDocument
from miner_guard.system.clock import FakeClock, iso_utc, parse_iso_utc
from miner_guard.watch.state import CONDITIONS, Memory, StateMonitor, judge
from miner_guard.watch.state_words import first_words, headline, problem
from tests.support.contexts import context
from tests.support.event_names import events as logged_events
from tests.support.run_states import (
    FULL,
    GPU,
    HANG,
    LOOP,
    NAN,
    OUT_OF_MEMORY,
    RESTARTING,
    SAVED,
    SITUATIONS,
    STRAGGLER,
    Situation,
    healthy,
    memory_of,
)


def typed(**changes: Any) -> StatusDocument:
    return StatusDocument.from_json(healthy(**changes))


def judged(*events: Event, **changes: Any) -> RunState:
    return judge(typed(**changes), memory_of(events))


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_each_situation_has_its_axes_and_its_words(situation: Situation) -> None:
    state = situation.state()
    axes = (first_words(state), state.colour, state.life, state.health, state.earning)
    assert axes == (
        situation.words,
        situation.colour,
        situation.life,
        situation.health,
        situation.earning,
    )
    assert situation.cause in str(state.cause)


def test_what_validators_have_earns_until_it_is_too_old_whatever_happens() -> None:
    """Files of 371 s once read NOT EARNING for a hang, and STILL EARNING at 1,862 s for a block."""
    troubles: tuple[tuple[tuple[Event, ...], dict[str, Any]], ...] = (
        ((HANG,), {}),
        ((NAN,), {}),
        ((), {"uploads__decision__allowed": False, "uploads__repo__due": True}),
        ((RESTARTING,), {"state": "waiting"}),
    )
    for events, changes in troubles:
        for age_s, stale, earning in ((371.0, False, "at risk"), (2100.0, True, "no")):
            aged = {"uploads__repo__age_s": age_s, "uploads__repo__stale": stale}
            assert judged(*events, **changes, **aged).earning == earning


def test_a_step_ends_what_kept_the_miner_from_stepping() -> None:
    memory = memory_of((HANG, RESTARTING, NAN))
    memory.stepped(float("nan"))
    assert judge(typed(), memory).key == "loss_nan"
    memory.stepped(3.4)
    assert judge(typed(), memory).key == "well"


def test_a_hang_stays_the_cause_while_its_miner_is_stopped_and_restarted() -> None:
    """The state must name the rank that hangs, not "the miner is stopping"."""
    assert judged(HANG, state="stopping").cause == (
        f"{HANG.fields['detail']}; the published files are 612 s old (limit 2,000 s)"
    )
    waiting = judged(HANG, RESTARTING, state="waiting")
    assert waiting.cause == f"{HANG.fields['detail']}; restarting, attempt 2 of 5"


def test_faults_that_recover_are_forgotten() -> None:
    back = event("gpu_fault", "info", "GPU RECOVERED: GPU 3 is back", gpu=3, what="is back")
    assert judged(GPU, back).key == "well"
    memory = memory_of((STRAGGLER, NAN))
    memory.launched()
    assert judge(typed(), memory).key == "well", "another launch has other ranks"


@pytest.mark.parametrize(
    ("steps", "key"),
    [
        ({"last_step_age_s": 58.0, "max_s": 1.4, "phase": "data"}, "overdue"),
        ({"last_step_age_s": 58.0, "max_s": 1.4, "phase": "val_loss"}, "well"),
        ({"last_step_age_s": 58.0, "max_s": 15.0, "phase": ""}, "well"),
        ({"last_step_age_s": 10.0, "max_s": 1.4, "phase": ""}, "well"),
        ({"last_step_age_s": 400.0, "max_s": 15.0, "phase": None}, "silent"),
        ({"last_step_age_s": 400.0, "max_s": 100.0, "phase": None}, "well"),
    ],
)
def test_an_overdue_step_does_not_count_as_well(steps: dict[str, Any], key: str) -> None:
    changes = {f"steps__{name}": value for name, value in steps.items()}
    watching = steps["phase"] is not None
    assert judged(**changes, hang__limit_s=300.0, hang__watching=watching).key == key


def test_the_first_step_may_take_its_time_and_no_longer() -> None:
    began, later = iso_utc(1_000_000.0), iso_utc(1_002_000.0)
    waiting = {"steps": {}, "started": began, "updated": iso_utc(1_000_060.0)}
    early, late = typed(**waiting), typed(**{**waiting, "updated": later})
    for status, wrong in ((early, False), (late, True)):
        state = judge(status, Memory())
        assert (state.life, state.stage) == ("starting", "waiting for the first step")
        shown = StatusDocument.from_json({"state": "running", "verdict": state.to_json()})
        assert (problem(shown) is not None) == wrong


def test_every_condition_names_a_logged_event() -> None:
    events = [condition.event for condition in CONDITIONS if condition.event]
    assert set(events) <= set(logged_events())


def test_every_next_step_names_an_existing_command() -> None:
    """At four in the morning, the person on call wants a command to type, not "check the log"."""
    memory = memory_of((GPU, STRAGGLER, OUT_OF_MEMORY))
    for condition in CONDITIONS:
        status, action = typed(start_command="pm2 restart m", state_dir="/a b"), condition.action
        step = action if isinstance(action, str) else action(status, memory)
        assert bool(step) == (condition.key not in ("finished", "preflight"))
        commands = re.findall(r"`([^`]+)`", step)
        assert commands or not step, f"{condition.key}: {step}"
        for command in commands:
            program, *words = shlex.split(command)
            assert program in {"miner-guard", "df", "pm2", "nvidia-smi", "btcli"}, command
            if program == "miner-guard":
                assert words[0] in COMMANDS, command
                assert set(re.findall(r"--event (\w+)", command)) <= set(logged_events()), command


@pytest.mark.parametrize(
    ("status", "events", "words"),
    [
        ({}, (SAVED, NAN), "from before the NaN, `/data/step-600.pt`, then"),
        ({}, (NAN, SAVED), "the miner reported none"),
        ({"state": "done", "start_command": "pm2 restart sn38"}, (), "`pm2 restart sn38`"),
        ({"state_dir": "/var/lib/guard"}, (FULL,), "`df -h /var/lib/guard`"),
        (
            {
                "host": "node-7",
                "diagnosis__ranks": [{"rank": 12, "uuid": "GPU-b"}],
                "health__gpus__gpus": [{"index": 5, "uuid": "GPU-b"}, {"index": 6, "uuid": "x"}],
            },
            (STRAGGLER,),
            "GPU 5 on host node-7; check it with `nvidia-smi -i 5 -q",
        ),
        (
            {"start_command": "pm2 restart sn38"},
            (OUT_OF_MEMORY, LOOP),
            "Halve the batch. Then start the guard: `pm2 restart sn38`",
        ),
        (
            {
                "uploads__decision__allowed": False,
                "uploads__decision__reason": "base (60) < network (61). Reload the global state",
                "uploads__repo__due": True,
            },
            (),
            "reload the global state; to see each rule and its limit: `miner-guard logs",
        ),
    ],
)
def test_the_next_step_finishes_the_job(
    status: dict[str, Any], events: tuple[Event, ...], words: str
) -> None:
    """The reader must not have to look up the checkpoint's path."""
    assert words in str(judged(*events, **status).next_step)


def test_a_median_near_the_limit_does_not_change_the_state_with_each_step() -> None:
    memory = Memory()
    medians = ((60.1, "bad"), (59.9, "poor"), (60.1, "bad"), (53.0, "poor"), (59.0, "poor"))
    keys = [
        judge(typed(steps__p50_s=seconds, steps__grade=grade), memory).key
        for seconds, grade in medians
    ]
    assert keys == ["slow", "slow", "slow", "well", "well"]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.clock, self.status = FakeClock(), healthy()
        self.monitor = StateMonitor(context(folder, clock=self.clock, status=lambda: self.status))

    def run(self, seconds: float, **changes: Any) -> list[str]:
        self.status = healthy(**changes)
        lines = []
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            found = self.monitor.on_tick(self.clock.monotonic(), {})
            lines += [event.text for event in found]
        return lines


def test_one_line_reports_each_change_and_since_when(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (earning,) = bench.run(60)
    assert earning.startswith("VERDICT: EARNING since ")
    (broken,) = bench.run(60, steps__loss="NaN")
    assert broken.startswith("VERDICT: EARNING AT RISK since ")
    assert "loss is NaN at step 84" in broken


def test_the_log_skips_what_comes_and_goes_but_the_surfaces_show_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(60)
    since = bench.monitor.snapshot()["since"]
    assert bench.run(3, steps__loss="NaN") == []
    assert bench.monitor.snapshot()["key"] == "loss_nan"
    assert bench.run(60) == []
    assert bench.monitor.snapshot()["since"] == since


def test_another_cause_of_the_same_words_keeps_since(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(60, uploads__audit__outcome="rejected")
    since = bench.monitor.snapshot()["since"]
    (line,) = bench.run(60, uploads__repo__stale=True)
    assert "612 s old" in line
    assert bench.monitor.snapshot()["since"] == since


def test_a_hang_counts_from_its_first_silent_second(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(1000)
    found_at = bench.clock.wall()
    bench.monitor.on_event(HANG)
    bench.run(10, hang__hang="rank 1 in data for 912s")
    since = parse_iso_utc(bench.monitor.snapshot()["since"])
    assert since == pytest.approx(found_at - 912.0, abs=2.0)


def test_a_crash_is_the_state_at_once(tmp_path: Path) -> None:
    """The alert for a crash must not say EARNING, nor wait for the first upload."""
    bench = Bench(tmp_path)
    bench.run(60)
    bench.monitor.on_event(OUT_OF_MEMORY)
    bench.monitor.on_event(RESTARTING)
    assert bench.monitor.snapshot()["life"] == "restarting"


def test_a_guard_that_stops_does_not_stay_earning(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(60)
    (event,) = bench.monitor.on_stop()
    assert event.text.startswith("VERDICT: STOPPED since ")
    assert bench.monitor.snapshot()["life"] == "stopped"


def test_a_date_is_named_where_since_is_of_another_day() -> None:
    state = RunState(life="training", since="2026-01-02T12:03:04Z", cause="x")
    assert headline(state, "2026-01-04T00:00:00Z") == "TRAINING since 2026-01-02 12:03 UTC: x"
