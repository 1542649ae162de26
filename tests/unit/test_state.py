"""One judgement of the run: life, health, earning and the next step."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import COMMANDS
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import NO_REPO, RunState, StatusDocument
from miner_guard.system.clock import FakeClock, iso_utc, parse_iso_utc
from miner_guard.watch.state import CONDITIONS, Memory, StateMonitor, judge
from miner_guard.watch.state_words import HEALTH, earning_words, first_words, headline, problem
from tests.support.contexts import JobsAtOnce, context
from tests.support.event_names import events as logged_events
from tests.support.guard_log import Log


def _said(name: str, level: str, **fields: Any) -> Event:
    return event(name, level, "its line", rank=fields.pop("of", None), **fields)


_AGAIN = "cuda_oom again after a restart; a restart does not fix it. Fix: Halve the batch."
_STALL = "rank 1 in data for 912s, ranks 0,2-3 waiting in allreduce"
RESTARTING = _said(
    "miner_restarting", "warning", attempt=2, max_restarts=5, cause="it ended with 1"
)
HANG = _said("hang_detected", "critical", detail=_STALL, culprits=[1], idle_s=912.0, limit_s=300.0)
STRAGGLER = _said("straggler", "warning", of=12, detail="works 14.2s a step", score=0.6)
_SEEN = {
    "evidence": "/state/incidents/x",
    "excerpt": "Traceback\n  x\ntorch.OutOfMemoryError: CUDA out of memory\n",
}
OUT_OF_MEMORY = _said("incident", "error", label="cuda_oom", fix="Halve the batch.", **_SEEN)
LOOP = _said("crash_loop", "critical", detail=_AGAIN, restarts=1)
FULL = _said("disk_full", "critical", what="guard.jsonl", reason="No space left on device")
NAN = _said("loss_nan", "critical", step=72, loss="NaN", outer_step=62)
PREFLIGHT = tuple(
    _said("preflight", "critical", outcome="critical", check=check, next_step=step)
    for check, step in (("driver.nvml", "install the driver"), ("gpu.count", "restart it"))
)
SAVED = _said("checkpoint", "info", path="/data/step-600.pt", step=600)
GPU = _said("gpu_fault", "critical", gpu=3, what="fell off the bus", next_step="restart the host")


def healthy(**changes: Any) -> dict[str, Any]:
    """A miner that publishes and trains; `uploads__repo__stale=True` changes one value."""
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
            "repo": {
                "stale": False,
                "due": False,
                "age_s": 612,
                "limit_s": 2000,
                "revision": "1.56.51",
            },
        },
        "hang": {"hang": None, "watching": True},
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


def memory_of(events: Iterable[Event]) -> Memory:
    """What the judge remembers after these events."""
    memory = Memory()
    for each in events:
        memory.take(each)
    return memory


def typed(**changes: Any) -> StatusDocument:
    return StatusDocument.from_json(healthy(**changes))


def judged(*events: Event, **changes: Any) -> RunState:
    return judge(typed(**changes), memory_of(events))


_PLAIN: dict[str, Any] = {"uploads": {"repo": {"reason": NO_REPO}}, "chain": {}}
_REPO = "uploads__repo__"
_DECISION = "uploads__decision__"
_BLOCKED = {f"{_DECISION}allowed": False, f"{_REPO}due": True, f"{_REPO}age_s": 1862}
_BLOCKED[f"{_DECISION}reason"] = "base (60) < network (61). Reload the global state"
_STALE = {f"{_REPO}stale": True, f"{_REPO}age_s": 2100}
_NO_GPU = {"gpus": {"state": "absent", "reason": "NVML Shared Library Not Found"}}
_ON_CPU = {"ranks__cpu_fallback": {str(rank): {"verdict": "certain"} for rank in range(4)}}
_DONE = {"state": "done", **_PLAIN}
_LATE = {"started": iso_utc(1_000_000.0), "updated": iso_utc(1_002_000.0), "steps": {}, **_PLAIN}

SCENES: dict[str, tuple[dict[str, Any], tuple[Event, ...]]] = {
    "healthy": ({}, ()),
    "plain trainer": (_PLAIN, ()),
    "preflight": ({"state": "starting", "steps": {}, **_PLAIN}, ()),
    "first minute": ({"steps": {}, **_PLAIN}, ()),
    "late": (_LATE, ()),
    "before an upload": ({"uploads": {"repo": {"empty": True}}}, ()),
    "slow rank": ({}, (STRAGGLER,)),
    "slow steps": ({"steps__grade": "bad", "steps__p50_s": 71.0}, ()),
    "overdue": ({"steps__last_step_age_s": 61.0, "steps__max_s": 15.0, "steps__phase": "data"}, ()),
    "hang": ({"hang__hang": _STALL, f"{_REPO}age_s": 371}, ()),
    "silent": ({"steps__last_step_age_s": 400.0, "hang__watching": False}, ()),
    "nan": ({f"{_REPO}age_s": 1817}, (NAN,)),
    "nan, plain": (_PLAIN, (NAN,)),
    "crash": ({"state": "waiting"}, (RESTARTING,)),
    "out of memory": ({"state": "waiting"}, (OUT_OF_MEMORY, RESTARTING)),
    "crash loop": ({"state": "done", "exit_code": 75}, (OUT_OF_MEMORY, LOOP)),
    "blocked": (_BLOCKED, ()),
    "stale": (_STALE, ()),
    "rejected": ({"uploads__audit__outcome": "rejected"}, ()),
    "unregistered": ({"chain__registered": False}, ()),
    "unpaid": ({"chain__unpaid": "its emission is 0"}, ()),
    "cpu fallback": ({**_ON_CPU, "health": _NO_GPU}, ()),
    "gpu fault": ({}, (GPU,)),
    "disk full": ({}, (FULL,)),
    "over budget": ({"costs__budget_status": "critical", "costs__share_pct": 11.2}, ()),
    "refused": ({**_DONE, "exit_code": 69, "reason": "preflight: no driver", "steps": {}}, ()),
    "finished": ({**_DONE, "exit_code": 0, "last_exit": {"code": 0, "finished": True}}, ()),
    "paused": ({"state": "paused"}, ()),
    "stopped": ({**_DONE, "exit_code": 0, "reason": "SIGTERM"}, ()),
    "restarts off": ({**_DONE, "exit_code": 3, "reason": "restarts are off; exit code 3"}, ()),
}
"""What is written of each situation, and which events have come."""

WORDS = """\
healthy         |EARNING                     |green |training  |yes       |inner step 84
plain trainer   |TRAINING                    |green |training  |          |loss 3.40
preflight       |STARTING                    |grey  |starting  |          |the preflight
first minute    |STARTING                    |grey  |starting  |          |no step yet
late            |STARTING                    |yellow|starting  |          |no first step within
before an upload|TRAINING                    |green |training  |not proven|inner step 84
slow rank       |EARNING, degraded           |yellow|training  |yes       |rank 12 works 14.2s
slow steps      |EARNING, degraded           |yellow|training  |yes       |steps take 71 s
overdue         |EARNING AT RISK             |yellow|training  |at risk   |no step for 61 s
hang            |HUNG, earning at risk       |red   |hung      |at risk   |rank 1 in data for
silent          |HUNG, earning at risk       |red   |hung      |at risk   |no step for 400 s
nan             |EARNING AT RISK             |red   |training  |at risk   |NaN since step 72 of
nan, plain      |TRAINING, failing           |red   |training  |          |of outer step 62
crash           |RESTARTING, earning at risk |yellow|restarting|at risk   |attempt 2 of 5
out of memory   |RESTARTING, earning at risk |yellow|restarting|at risk   |with 1 (torch.OutOf
crash loop      |STOPPED                     |red   |stopped   |at risk   |crash loop: cuda_oom
blocked         |EARNING AT RISK             |yellow|training  |at risk   |base (60) < network
stale           |NOT EARNING                 |red   |training  |no        |files are 2100s old
rejected        |NOT EARNING                 |red   |training  |no        |would reject the
unregistered    |NOT EARNING                 |red   |training  |no        |not registered
unpaid          |NOT EARNING                 |red   |training  |no        |pays no miner: its
cpu fallback    |EARNING AT RISK             |red   |training  |at risk   |CPU on ranks 0-3; no
gpu fault       |EARNING, degraded           |yellow|training  |yes       |GPU 3 fell off the
disk full       |EARNING, degraded           |yellow|training  |yes       |disk of the state
over budget     |EARNING, degraded           |yellow|training  |yes       |takes 11.2%
refused         |REFUSED                     |red   |refused   |          |preflight: no driver
finished        |FINISHED                    |grey  |finished  |          |finished its work
paused          |STOPPED                     |grey  |stopped   |at risk   |an operator paused
stopped         |STOPPED                     |grey  |stopped   |          |miner (SIGTERM)
restarts off    |STOPPED                     |red   |stopped   |          |restarts are off"""
"""The first words, colour, life, earning and part of the cause of each."""


@pytest.mark.parametrize("row", WORDS.splitlines(), ids=lambda row: row.partition("|")[0].strip())
def test_each_situation_has_its_axes_and_its_words(row: str) -> None:
    name, words, colour, life, earning, cause = (part.strip() for part in row.split("|"))
    changes, events = SCENES[name]
    state = judged(*events, **changes)
    axes = (first_words(state), state.colour, state.life, state.health, state.earning)
    assert axes == (words, colour, life, HEALTH.get(colour, "well"), earning or None)
    assert cause in str(state.cause)


def test_the_situations_cover_every_condition() -> None:
    keys = {judged(*events, **changes).key for changes, events in SCENES.values()}
    assert keys == {condition.key for condition in CONDITIONS} | {"well"}


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


@pytest.mark.parametrize(
    ("uploads", "why", "step"),
    [
        ({"upload": {"outcome": "verified"}}, "but no audit has judged it", "`miner-guard audit`"),
        ({"upload": {"outcome": "failed", "error": "403"}}, "upload failed: 403", "upload_failed"),
        ({"upload": {"outcome": "refuted"}}, "the last upload failed", "upload_failed"),
        (
            {"upload": {"outcome": "reported", "error": "not verified: no answer"}},
            "was not verified: no answer",
            "upload_unverified",
        ),
        ({"repo": {"reason": "timed out"}}, "cannot be read: timed out", "`miner-guard audit`"),
        ({"repo": {"age_s": 5.0, "reason": None}}, "no audit has judged", "`miner-guard audit`"),
        ({}, "nothing is published yet", "wait for the first upload"),
    ],
)
def test_the_next_step_follows_from_what_happened_to_the_uploads(
    uploads: dict[str, Any], why: str, step: str
) -> None:
    """It once said to wait for the first upload after several were verified."""
    repo = {"empty": True, "limit_s": 2000.0, **uploads.pop("repo", {})}
    repo["empty"] = repo["empty"] and "reason" not in repo
    state = judged(uploads={"repo": repo, **uploads})
    assert earning_words(state).startswith("not proven: ")
    assert why in str(state.earning_why)
    assert step in str(state.next_step)
    assert "miner-guard top" not in str(state.next_step)


def test_the_state_of_a_client_and_its_age_are_in_the_headline() -> None:
    """Its own health endpoint says healthy whatever happens."""
    queued = {"phase": "queued", "phase_s": 9000.0, "position": 1900, "returns": 3}
    cause = judged(log_only=queued, steps={}).cause
    assert "no step yet; queued for 2.5 h at position 1900, moved back 3 times" in str(cause)
    merging = {"phase": "allreduce", "phase_s": 80.0, "position": 1900, "returns": 3}
    assert str(judged(log_only=merging).cause).endswith("; allreduce for 80 s")


def test_a_block_is_in_the_headline_until_its_step_is_reached() -> None:
    reason = "inner_step (15) < minimum (50). Validators will reject this!"
    decision = {"allowed": False, "reason": reason}
    uploads = {"repo": {"empty": True}, "decision": decision}
    early = judged(uploads=uploads, steps__inner_step=20, steps__p50_s=2.0)
    assert str(early.cause).endswith("; the gate blocks uploads: inner_step (15) < minimum (50)")
    assert str(early.next_step).startswith("wait for inner step 50, in about 60 s; to see")
    aging = {**uploads, "repo": {"age_s": 1980.0, "limit_s": 2000.0}}
    late = judged(uploads=aging, steps__inner_step=20, steps__p50_s=2.0)
    words = "in about 60 s; the published files are too old in 20 s: lower [gate] min_inner_step in"
    assert words in str(late.next_step)
    decision["note"] = "validators accept from inner step 1; your minimum is 50: 1 min to go"
    whose = judged(uploads=uploads, steps__inner_step=20, steps__p50_s=2.0)
    assert "validators accept from inner step 1; your minimum is 50" in str(whose.cause)
    assert "blocks" not in str(judged(uploads=uploads, steps__inner_step=50).cause)


@pytest.mark.parametrize("scene", SCENES)
def test_each_state_says_whether_what_is_published_earns(scene: str) -> None:
    """Of a crash loop, an OOM or a refusal, it once said nothing about the earnings."""
    changes, events = SCENES[scene]
    for repo, words in (
        ({"empty": True, "limit_s": 2000.0}, "not proven: nothing is published yet"),
        ({"age_s": 2100.0, "limit_s": 2000.0, "stale": True}, "no"),
    ):
        shown = judged(*events, **{**changes, "chain": {}, "uploads": {"repo": repo}})
        if scene != "unregistered":
            assert earning_words(shown).startswith(words)
    plain = judged(*events, **{**changes, **_PLAIN})
    assert (
        earning_words(plain) == "nothing is published; no [repo] kind in guard.toml"
        or scene == "unregistered"
    )


def test_a_headline_that_nobody_updates_names_a_time_and_no_age() -> None:
    ended = {"state": "done", "updated": iso_utc(1_000_000.0), "exit_code": 0, "reason": "SIGTERM"}
    assert earning_words(judged(**ended)) == (
        "at risk: the published files are too old from 1970-01-12 14:09 UTC on"
    )


def test_a_step_ends_what_kept_the_miner_from_stepping() -> None:
    """Rank 0's next loss once ended the NaN of rank 2."""
    memory = memory_of((HANG, RESTARTING, replace(NAN, fields={**NAN.fields, "ranks": [2]})))
    for rank, loss in ((2, float("nan")), (0, 3.4)):
        memory.stepped(rank, loss)
        assert judge(typed(), memory).key == "loss_nan"
    memory.stepped(2, 3.4)
    assert judge(typed(), memory).key == "well"


def test_a_hang_stays_the_cause_while_its_miner_is_stopped_and_restarted() -> None:
    """The state must name the rank that hangs, not "the miner is stopping"."""
    stopping = judged(HANG, state="stopping", steps__last_step_age_s=930.0)
    assert stopping.cause == f"{_STALL.replace(' for 912s', '')}; no step for 16 min"
    assert stopping.earning_why == "the published files are 612s old (limit 2000s)"
    waiting = judged(HANG, RESTARTING, state="waiting")
    assert waiting.cause == f"hung: {HANG.fields['detail']}; restarting, attempt 2 of 5"
    client = memory_of((replace(HANG, fields={**HANG.fields, "advice": "leave it running"}),))
    client.limits = replace(client.limits, action="warn")
    waits = typed(steps={}, log_only={"phase": "waiting", "phase_s": 7200.0})
    assert judge(waits, client).next_step == "leave it running"
    assert str(judge(waits, client).cause).endswith("allreduce; waiting for 2 h")


@pytest.mark.parametrize(
    ("reason", "words"),
    [("database or disk is full", "is full"), ("Input/output error", "is not responding")],
)
def test_a_full_disk_is_told_from_a_dead_one(reason: str, words: str) -> None:
    """SQLite's words once read as a disk that does not respond."""
    failed = _said("disk_full", "critical", what="run.db", reason=reason)
    assert words in str(judged(failed).cause)


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


def test_a_step_after_an_allreduce_is_not_overdue_from_its_begin() -> None:
    """Of a healthy simulated week, each outer step began with EARNING AT RISK."""
    memory, slowest = Memory(), {"steps__max_s": 15.0, "steps__phase": "forward"}
    judge(typed(steps__phase="allreduce", steps__last_step_age_s=240.0), memory)
    keys = [
        judge(typed(steps__last_step_age_s=age_s, **slowest), memory).key
        for age_s in (250.0, 310.0, 5.0, 61.0)
    ]
    assert keys == ["well", "overdue", "well", "overdue"]


def test_the_first_step_may_take_its_time_and_no_longer() -> None:
    began, later = iso_utc(1_000_000.0), iso_utc(1_002_000.0)
    waiting = {"steps": {}, "started": began, "updated": iso_utc(1_000_060.0)}
    early, late = typed(**waiting), typed(**{**waiting, "updated": later})
    for status, wrong in ((early, False), (late, True)):
        state = judge(status, Memory())
        assert (state.life, state.stage) == ("starting", "waiting for the first step")
        shown = StatusDocument.from_json({"state": "running", "verdict": state.to_json()})
        assert (problem(shown) is not None) == wrong == ("30 min" not in str(state.next_step))


def test_every_condition_names_a_logged_event() -> None:
    events = [condition.event for condition in CONDITIONS if condition.event]
    assert set(events) <= set(logged_events())


def test_every_next_step_names_an_existing_command() -> None:
    """At four in the morning, the person on call wants a command to type, not "check the log"."""
    for changes, events in SCENES.values():
        where = {"start_command": "pm2 restart m", "state_dir": "/a b"}
        state = judged(*events, **changes, **where)
        step = str(state.next_step)
        assert "miner-guard top" not in step, "top itself shows it"
        assert step or state.key in ("finished", "preflight", "well")
        commands = re.findall(r"`([^`]+)`", step)
        assert commands or not step or "halve the batch" in step, f"{state.key}: {step}"
        for command in commands:
            program, *words = shlex.split(command)
            programs = {"miner-guard", "df", "pm2", "nvidia-smi", "btcli", "top", "tail"}
            assert program in programs, command
            if program == "miner-guard":
                assert words[0] in COMMANDS, command
                assert set(re.findall(r"--event (\w+)", command)) <= set(logged_events()), command


@pytest.mark.parametrize(
    ("status", "events", "words"),
    [
        ({}, (SAVED, NAN), "load the last checkpoint from before the NaN, `/data/step-600.pt`"),
        ({}, (NAN, SAVED), "`miner-guard ctl restart`: the miner starts again from what its own"),
        ({"state": "done", "start_command": "pm2 restart sn38"}, (), "`pm2 restart sn38`"),
        (
            {"state": "done", "exit_code": 69, "reason": "preflight: driver.nvml, gpu.count"},
            PREFLIGHT,
            "first install the driver (driver.nvml); then see what is left with `miner-guard doc",
        ),
        (
            {"uploads": {"upload": {"outcome": "verified"}}, "settings_file": "/srv/guard.toml"},
            (),
            "whether validators accept it; [repo] audit_every_s = 600 in /srv/guard.toml does so",
        ),
        ({"state_dir": "/var/lib/guard"}, (FULL,), "`df -h /var/lib/guard`), at worst by deleting"),
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
            {
                "rank_processes": {"12": {"pid": 77, "local_rank": 4}},
                "health__gpus": {"state": "absent"},
            },
            (STRAGGLER,),
            "runs on the CPU, as process 77; check it with `top`: end other programs that take",
        ),
        ({"state": "waiting"}, (OUT_OF_MEMORY, RESTARTING), "if it fails again: halve the batch"),
        (
            {"start_command": "pm2 restart sn38"},
            (OUT_OF_MEMORY, LOOP),
            "the batch; the miner's last lines: `tail -n 30 /state/incidents/x/output.log`; then "
            "start the guard: `pm2 restart sn38`",
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
        (_STALE, (), "(outer step 56, inner step 84); then check it: `miner-guard audit`"),
        ({**_STALE, "uploads__upload": {"outcome": "failed"}}, (), "--event upload_failed "),
        ({**_STALE, f"{_DECISION}allowed": True}, (), "start the upload in the miner's own code"),
        ({**_STALE, **_BLOCKED}, (), "--event upload_blocked"),
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
        self.emitted: list[Event] = []
        self.monitor = StateMonitor(
            context(
                folder,
                clock=self.clock,
                status=lambda: self.status,
                jobs=JobsAtOnce(),
                emit=self.emitted.append,
            )
        )

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
    assert "612s old" in line
    assert bench.monitor.snapshot()["since"] == since


def test_a_hang_counts_from_its_first_silent_second(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(1000)
    found_at = bench.clock.wall()
    bench.monitor.on_event(HANG)
    bench.run(10, hang__hang="rank 1 in data for 912s")
    since = parse_iso_utc(bench.monitor.snapshot()["since"])
    assert since == pytest.approx(found_at - 912.0, abs=2.0)


def test_a_stale_repo_counts_from_when_it_became_stale(tmp_path: Path) -> None:
    """It once said NOT EARNING since the guard's start of files that were hours old."""
    bench = Bench(tmp_path)
    bench.run(10, uploads__repo__stale=True, uploads__repo__age_s=18_000.0)
    since = parse_iso_utc(bench.monitor.snapshot()["since"])
    assert bench.clock.wall() - since == pytest.approx(16_000.0, abs=15.0)


def test_the_line_that_tells_of_training_again_ends_with_the_incidents_card(tmp_path: Path) -> None:
    log, bench = Log(tmp_path), Bench(tmp_path)
    log.step(1)
    log.say("hang_detected", "critical", detail="rank 1 in data for 45s", idle_s=45.0)
    log.step(2, seconds=7.0)
    bench.run(60)
    bench.run(60, hang__hang="rank 1 in data for 45s")
    assert bench.run(60) == []
    (line,) = [event.text for event in bench.emitted]
    assert line.startswith("VERDICT: EARNING since ")
    assert line.endswith("data for 45s. Noticed after 45 s, training again after 52 s.")


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
