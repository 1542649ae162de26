"""One verdict on every surface: is the miner earning, and if not, why and since when."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli import screen
from miner_guard.cli.main import COMMANDS
from miner_guard.eventlog.catalog import make_finding, message
from miner_guard.eventlog.status_document import StatusDocument, VerdictStatus
from miner_guard.record.events import Event
from miner_guard.system.clock import FakeClock, parse_iso_utc
from miner_guard.watch.state import (
    CONDITIONS,
    DEGRADED,
    EARNING,
    NOT_EARNING,
    STOPPED,
    UNKNOWN,
    Memory,
    VerdictMonitor,
    headline,
    judge,
    state_words,
)
from tests.support.contexts import context
from tests.support.event_names import events as logged_events

RESTARTING = make_finding(
    "miner_restarting", wait_s=4.0, attempt=2, max_restarts=5, cause="it ended with code 1"
)
HANG = make_finding(
    "hang_detected",
    detail="rank 1 in data for 912s, ranks 0,2-3 waiting in allreduce",
    culprits=[1],
    idle_s=912.0,
    limit_s=300.0,
)
STRAGGLER = make_finding("straggler", rank=12, detail="works 14.2s a step", score=0.6)
OUT_OF_MEMORY = make_finding(
    "incident", label="cuda_oom", cause="c", fix="Halve the batch.", excerpt="x"
)
LOOP = make_finding(
    "crash_loop",
    detail="cuda_oom again after a restart; a restart does not fix it. Halve the batch.",
    restarts=1,
)
FULL = make_finding("disk_full", what="guard.jsonl", reason="No space left on device")
NAN = make_finding("loss_nan", step=72, loss="NaN", outer_step=62)
SAVED = make_finding(
    "checkpoint_saved", path="/data/step-600.pt", step=600, seconds=8.0, size_bytes=1
)
GPU = make_finding("gpu_fault", gpu=3, what="fell off the bus", next_step="restart the host")


def healthy(**changes: Any) -> dict[str, Any]:
    status: dict[str, Any] = {
        "state": "running",
        "steps": {
            "outer_step": 56,
            "inner_step": 84,
            "total_steps": 84,
            "loss": 3.4,
            "grade": "good",
            "p50_s": 15.0,
        },
        "uploads": {
            "audit": {"outcome": "accepted", "detail": "12 of 12 rules"},
            "repo": {"stale": False, "due": False, "age_s": 612, "revision": "1.56.51"},
        },
        "hang": {"hang": None},
        "chain": {"registered": True},
        "ranks": {"cpu_fallback": {}},
        "costs": {"budget_status": "ok", "share_pct": 0.1},
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        table = status
        for name in way:
            table = table.setdefault(name, {})
        table[last] = value
    return status


def typed(**changes: Any) -> StatusDocument:
    return StatusDocument.from_json(healthy(**changes))


@pytest.mark.parametrize(
    ("changes", "events", "state", "words"),
    [
        ({}, (), EARNING, "training at outer step 56, inner step 84, loss 3.40"),
        ({"uploads": {}}, (), UNKNOWN, "earning is not proven: nothing has been uploaded yet"),
        ({"steps__loss": "NaN"}, (), NOT_EARNING, "loss is NaN at step 84"),
        ({"hang__hang": "rank 1 in data for 912s"}, (), NOT_EARNING, "rank 1 in data"),
        ({"chain__registered": False}, (), NOT_EARNING, "not registered"),
        ({"uploads__audit__outcome": "rejected"}, (), NOT_EARNING, "validators would reject"),
        ({"uploads__repo__stale": True}, (), NOT_EARNING, "612 s old"),
        ({"ranks__cpu_fallback": {"2": {"verdict": "certain"}}}, (), NOT_EARNING, "CPU on rank 2"),
        (
            {
                "ranks__cpu_fallback": {str(rank): {"verdict": "certain"} for rank in range(4)},
                "health": {"gpus": {"state": "absent", "reason": "NVML Shared Library Not Found"}},
            },
            (),
            NOT_EARNING,
            "CPU on ranks 0-3; no GPU: this machine has no NVIDIA driver",
        ),
        ({"state": "waiting"}, (RESTARTING,), NOT_EARNING, "code 1; restarting, attempt 2 of 5"),
        ({"state": "waiting"}, (HANG, RESTARTING), NOT_EARNING, "rank 1 in data for 912s"),
        ({"state": "paused"}, (), STOPPED, "an operator paused"),
        ({}, (make_finding("crash_loop", detail="5 failures", restarts=5),), STOPPED, "crash loop"),
        ({"steps": {}}, (), UNKNOWN, "no step seen yet"),
        ({}, (GPU,), DEGRADED, "GPU 3 fell off the bus"),
        ({"steps__grade": "bad", "steps__p50_s": 240.0}, (), DEGRADED, "steps take 240 s"),
        ({"costs__budget_status": "critical", "costs__share_pct": 11.2}, (), DEGRADED, "11.2%"),
        ({"steps__loss": "NaN", "costs__budget_status": "critical"}, (), NOT_EARNING, "NaN"),
    ],
)
def test_the_worst_condition_is_the_verdict(
    changes: dict[str, Any], events: tuple[Event, ...], state: str, words: str
) -> None:
    memory = Memory()
    for event in events:
        memory.take(event)
    judged = judge(typed(**changes), memory)
    assert (judged.state, words in judged.cause) == (state, True), judged


def test_a_step_ends_what_kept_the_miner_from_stepping() -> None:
    memory = Memory()
    memory.take(HANG)
    memory.take(RESTARTING)
    memory.stepped(3.4)
    assert judge(typed(), memory).state == EARNING


def test_a_hang_stays_the_cause_while_its_miner_is_stopped_and_restarted() -> None:
    """The verdict must name the rank that hangs, not "the miner is stopping"."""
    memory = Memory()
    memory.take(HANG)
    stopping = judge(typed(state="stopping"), memory)
    assert (stopping.key, stopping.cause) == ("hang", HANG.fields["detail"])
    memory.take(RESTARTING)
    waiting = judge(typed(state="waiting"), memory)
    assert waiting.key == "restarting", "another key, so that the attempt gets a line"
    assert waiting.cause == f"{HANG.fields['detail']}; restarting, attempt 2 of 5"


def test_a_straggler_is_named_with_its_rank() -> None:
    memory = Memory()
    memory.take(make_finding("straggler", rank=12, detail="works 14.2s a step", score=0.6))
    assert judge(typed(), memory).cause.startswith("rank 12 works 14.2s a step;")


@pytest.mark.parametrize(
    ("uploads", "words"),
    [
        ({"audit": {"outcome": "accepted"}}, "STILL EARNING, degraded"),
        (
            {"upload": {"outcome": "verified"}, "repo": {"stale": False}},
            "EARNING NOT PROVEN, degraded",
        ),
        ({"audit": {"outcome": "accepted"}, "network": "gone"}, "EARNING NOT PROVEN, degraded"),
    ],
)
def test_a_degraded_miner_states_first_whether_it_earns(
    uploads: dict[str, Any], words: str
) -> None:
    """A first screen that names a problem must also say whether it costs money."""
    memory = Memory()
    memory.take(GPU)
    judged = judge(typed(uploads=uploads), memory)
    assert judged.state == DEGRADED
    assert state_words(judged.status()) == words


def test_a_fault_that_recovers_is_forgotten() -> None:
    memory = Memory()
    memory.take(GPU)
    memory.take(make_finding("gpu_recovered", gpu=3, what="is back"))
    assert judge(typed(), memory).state == EARNING


def test_an_event_that_the_status_does_not_show_yet_counts_already() -> None:
    """An alert for a NaN must not begin with EARNING."""
    memory = Memory()
    memory.take(make_finding("loss_nan", step=512, loss=None))
    assert judge(typed(), memory).cause == "Loss is NaN or Inf at step 512"
    memory.stepped(float("nan"))
    assert judge(typed(), memory).state == NOT_EARNING
    memory.stepped(3.4)
    assert judge(typed(), memory).state == EARNING


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ({"last_step_age_s": 58.0, "max_s": 1.4, "phase": "data"}, DEGRADED),
        ({"last_step_age_s": 58.0, "max_s": 1.4, "phase": "val_loss"}, EARNING),
        ({"last_step_age_s": 58.0, "max_s": 15.0, "phase": ""}, EARNING),
        ({"last_step_age_s": 10.0, "max_s": 1.4, "phase": ""}, EARNING),
    ],
)
def test_an_overdue_step_does_not_count_as_earning(steps: dict[str, Any], state: str) -> None:
    """The verdict must not be EARNING throughout the minutes before a hang is declared."""
    changes = {f"steps__{name}": value for name, value in steps.items()}
    assert judge(typed(**changes, hang__limit_s=300.0), Memory()).state == state


def test_an_empty_status_is_unknown_and_never_healthy() -> None:
    assert judge(StatusDocument(), Memory()).state == UNKNOWN


def test_every_condition_names_an_event_of_the_catalogue() -> None:
    events = [condition.event for condition in CONDITIONS if condition.event]
    assert set(events) <= set(logged_events())


def test_every_next_step_names_an_existing_command() -> None:
    """At four in the morning, the person on call wants a command to type, not "check the log"."""
    memory = Memory()
    for event in (GPU, STRAGGLER, OUT_OF_MEMORY):
        memory.take(event)
    for condition in CONDITIONS:
        step = condition.action(typed(start_command="pm2 restart m", state_dir="/a b"), memory)
        assert bool(step) == (condition.key != "finished")
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
        ({"steps__loss": "NaN"}, (SAVED, NAN), "from before the NaN, `/data/step-600.pt`, then"),
        ({"steps__loss": "NaN"}, (NAN, SAVED), "the miner reported none"),
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
            {"rank_processes": {"12": {"pid": 9, "local_rank": 4}}},
            (STRAGGLER,),
            "the GPU of local rank 4",
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
    memory = Memory()
    for event in events:
        memory.take(event)
    assert words in judge(typed(**status), memory).next_step


def test_a_crash_loops_fix_is_the_next_step_and_not_the_cause() -> None:
    memory = Memory()
    memory.take(OUT_OF_MEMORY)
    memory.take(LOOP)
    assert judge(typed(), memory).cause == (
        "crash loop: cuda_oom again after a restart; a restart does not fix it"
    )


def test_a_median_near_the_limit_does_not_change_the_verdict_with_each_step() -> None:
    """The verdict must not alternate for a week between "steps take 60.0 s" and EARNING."""
    memory = Memory()
    medians = ((60.1, "bad"), (59.9, "poor"), (60.1, "bad"), (53.0, "poor"), (59.0, "poor"))
    states = [
        judge(typed(steps__p50_s=seconds, steps__grade=grade), memory).state
        for seconds, grade in medians
    ]
    assert states == [DEGRADED, DEGRADED, DEGRADED, EARNING, EARNING]


def test_a_nan_is_dated_by_its_first_step() -> None:
    """The page must not name step 40 above a log that names step 72."""
    memory = Memory()
    memory.take(NAN)
    assert judge(typed(steps__loss="NaN", steps__inner_step=40), memory).cause == (
        "loss has been NaN since step 72 of outer step 62"
    )


class Bench:
    def __init__(self, folder: Path) -> None:
        self.clock, self.status = FakeClock(), healthy()
        self.monitor = VerdictMonitor(context(folder, clock=self.clock, status=lambda: self.status))

    def run(self, seconds: float, **changes: Any) -> list[str]:
        self.status = healthy(**changes)
        lines = []
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            found = self.monitor.on_tick(self.clock.monotonic(), {})
            lines += [message(event) for event in found]
        return lines


def test_one_line_reports_each_change_and_since_when(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (earning,) = bench.run(60)
    assert earning.startswith("VERDICT: EARNING since ")
    (broken,) = bench.run(60, steps__loss="NaN")
    assert broken.startswith("VERDICT: NOT EARNING since ")
    assert broken.endswith("loss is NaN at step 84")
    assert bench.monitor.snapshot()["next_step"].startswith("`miner-guard ctl pause`, restore ")


def test_what_comes_and_goes_within_seconds_changes_nothing(tmp_path: Path) -> None:
    """The verdict must not flap with each blocked upload or slow read."""
    bench = Bench(tmp_path)
    bench.run(60)
    assert bench.run(3, steps__loss="NaN") + bench.run(60) == []


def test_another_cause_of_the_same_state_keeps_since(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(60, steps__loss="NaN")
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


def test_a_date_is_named_where_since_is_of_another_day() -> None:
    document = VerdictStatus(state="earning", since="2026-01-02T12:03:04Z", cause="training")
    assert headline(document, "2026-01-04T00:00:00Z") == (
        "EARNING since 2026-01-02 12:03 UTC: training"
    )


def test_a_guard_that_stops_does_not_stay_earning(tmp_path: Path) -> None:
    """The status must not say EARNING while no miner is running."""
    bench = Bench(tmp_path)
    bench.run(60)
    (event,) = bench.monitor.on_stop()
    assert message(event).startswith("VERDICT: STOPPED since ")
    assert bench.monitor.snapshot()["state"] == STOPPED


def test_the_first_line_of_the_screen_is_the_verdict() -> None:
    judged = judge(typed(steps__loss="NaN"), Memory()).status("2026-01-02T12:03:04Z")
    first, step = screen.verdict_lines(StatusDocument(verdict=judged))
    assert first == "NOT EARNING since 12:03 UTC: loss is NaN at step 84"
    assert step.startswith("next   `miner-guard ctl pause`, restore ")
    assert step.endswith("`miner-guard ctl resume` (more: `miner-guard explain loss_nan`)")
    assert headline(None).startswith("UNKNOWN")


def test_a_guard_that_is_gone_is_unknown_and_not_what_it_last_knew() -> None:
    judged = judge(typed(), Memory()).status("2026-01-02T12:03:04Z")
    status = StatusDocument(verdict=judged, updated="2026-01-02T12:09:00.000Z")
    line, step = screen.verdict_lines(status, age_s=300.0)
    assert line.startswith("UNKNOWN since 12:09 UTC: the guard has written nothing for 5 min")
    assert step.startswith(
        "next   on the miner's machine, check whether the guard is running: `miner"
    )
