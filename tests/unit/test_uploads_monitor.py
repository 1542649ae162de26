"""Uploads: what the guard reports and how often, what it stores, and that it believes nothing
unverified."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.screen import lines
from miner_guard.config import Config, GateSettings, MinerSettings, RepoSettings
from miner_guard.rank.journal import UploadEntry
from miner_guard.rank.layout import FLAG_FIRST
from miner_guard.record.events import event
from miner_guard.record.status_document import StatusDocument
from miner_guard.record.store import RunReader, RunStore, event_row
from miner_guard.system.clock import iso_utc
from miner_guard.uploads import gate
from miner_guard.uploads.pushes import RepoWatch
from miner_guard.uploads.repos import Look
from miner_guard.validators.facts import Published
from miner_guard.watch import uploads as module
from miner_guard.watch.base import Exit
from tests.support.contexts import JobsNever, context
from tests.support.output import show
from tests.support.uploads_harness import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_the_gate_finds_the_repo_and_the_profiles_limits_in_its_inputs(bench: Bench) -> None:
    assert gate.read(bench.state.gate_inputs).published.reason == "not checked yet"
    bench.look()
    known = gate.read(bench.state.gate_inputs)
    assert known.published.age_s == 600.0
    assert known.limits["blocks_per_allreduce"] == 400
    assert bench.messages("repo_age") == ["Repo Age: 600s (keep < 1800s)"]


def test_a_slow_probe_does_not_undo_a_newer_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the repo would look old again although its push had been seen, and another upload
    would seem due."""
    before = bench.repo

    def overtaken(*_: object) -> Look:
        newer = Look(replace(before, age_s=2.0, inner_step=60))
        monkeypatch.setattr(module, "look_at", lambda *_: newer)
        bench.clock.advance(1.0)
        bench.look()
        return Look(before)

    monkeypatch.setattr(module, "look_at", overtaken)
    bench.look()
    assert gate.read(bench.state.gate_inputs).published.inner_step == 60


def test_stale_is_counted_from_the_last_probe_that_succeeded_even_when_the_storage_is_silent(
    bench: Bench,
) -> None:
    bench.look()
    bench.repo = Published(reason="no answer within 20 s")
    bench.clock.advance(60)
    bench.look()
    assert bench.messages("repo_age")[1:] == ["Repo Age: unknown: no answer within 20 s"]
    assert "no answer" in str(gate.read(bench.state.gate_inputs).published.reason)
    bench.clock.step_wall(-7200)
    assert [f.name for f in bench.tick(1300)] == []
    stale = bench.tick(100)
    assert [f.text for f in stale] == [
        "REPO STALE: the published upload is 2060s old (limit 2000s); upload now"
    ]
    assert bench.tick(10) == []
    assert len(bench.tick(600)) == 1
    bench.repo = Published(age_s=5.0, reason=None)
    bench.look()
    assert bench.tick(10) == []


def test_a_repo_that_was_emptied_is_reported_and_one_that_is_still_empty_is_not() -> None:
    watch, empty = RepoWatch(GateSettings()), Published(empty=True, reason=None)
    assert list(watch.observe(empty, 0.0)) == []
    list(watch.observe(Published(age_s=1.0, reason=None, revision="5.56.50", seen_at=60.0), 60.0))
    assert [f.text for f in watch.observe(empty, 120.0)] == [
        "Repo Age: unknown: nothing is published now (last seen: 5.56.50)"
    ]
    assert list(watch.observe(empty, 180.0)) == []
    assert watch.is_stale(60.0 + 2000.0), "what was published last is what the age counts from"


def test_what_the_ranks_read_stays_small_whatever_is_published(bench: Bench) -> None:
    bench.repo = replace(
        bench.repo, metadata={"x": "y" * 1_000_000}, config={"block_list": [1] * 1_000_000}
    )
    bench.look()
    assert bench.state.gate_inputs.stat().st_size < 10_000


def test_a_block_repeated_each_step_is_reported_first_and_when_it_changes(bench: Bench) -> None:
    events = []
    for inner in range(10, 50):
        bench.clock.advance(1.0)
        events += bench.entry(**bench.decide(inner))
    (first,) = events
    assert first.text.startswith(
        "UPLOAD BLOCKED: inner_step (10) < minimum (50). Validators will reject this!"
    )
    bench.clock.advance(300)
    (again,) = bench.entry(**bench.decide(49))
    assert again.fields["left_out"] == 39
    assert again.text.endswith("your minimum is 50) (asked 39 more times since the last line)")
    (allowed,) = bench.entry(**bench.decide(50))
    assert allowed.name == "upload_allowed"
    assert [f.name for f in bench.entry(**bench.decide(12))] == ["upload_blocked"]


def test_a_block_says_who_demands_what_and_how_long_that_takes(bench: Bench) -> None:
    bench.step(1, 60.0, FLAG_FIRST)
    bench.step(2, 20.0)
    (blocked,) = bench.entry(**bench.decide(26))
    assert blocked.fields["note"] == (
        "validators accept from inner step 1; your minimum is 50: 8 min to go"
    )


def test_forecast_is_reported_with_the_first_step_that_can_know(bench: Bench) -> None:
    bench.repo = Published(age_s=0.0, reason=None, outer_step=56)
    bench.look()
    assert bench.step(1, 62.0, FLAG_FIRST) == []
    (event,) = bench.step(2, 62.0)
    assert event.text == "UPLOAD FORECAST: inner_step 50 in 50 min, repo stale in 31 min"
    assert (event.fields["eta_min"], event.fields["stale_min"]) == (48 * 62 / 60, (2000 - 124) / 60)
    assert bench.step(3, 62.0) == []
    later = [f for inner in range(4, 30) for f in bench.step(inner, 62.0)]
    assert len(later) == 1


def test_numbers_that_sqlite_does_not_take_still_reach_the_gate(bench: Bench) -> None:
    """A metadata.json with an inner step of 20 digits once kept all later news of the repo from the
    gate."""
    bench.repo = Published(
        age_s=7.0, reason=None, outer_step=10**20, inner_step=51, checksum="\ud800"
    )
    bench.look()
    assert gate.read(bench.state.gate_inputs).published.age_s == 7.0


def test_after_a_restart_of_the_guard_the_status_shows_the_last_of_each(bench: Bench) -> None:
    """Otherwise the status would show no upload and no restart just when somebody wants to know why
    the guard restarted."""
    bench.entry(**bench.decide(15))
    bench.push("started")
    list(bench.monitor.on_exit(Exit(137, 9, False, False, 60.0)))
    store, ts = RunStore(bench.state.db), iso_utc(bench.clock.wall())
    for each in (
        event("incident", "error", "INCIDENT cuda_oom", rank=1, label="cuda_oom", cause=""),
        event("miner_restarting", "warning", "MINER RESTARTING", cause="exit 137", attempt=2),
    ):
        list(bench.monitor.on_event(each))
        head = {"ts": ts, "level": "error", "event": each.name, "msg": "", "rank": each.rank}
        store.write(event_row({**head, **each.fields}))
    store.close()
    list(bench.monitor.on_stop())
    before = bench.monitor.snapshot()
    bench.monitor = module.UploadsMonitor(bench.monitor.context)
    bench.jobs.run()
    after = bench.monitor.snapshot()
    for name in ("decision", "upload", "incident"):
        assert before[name] is not None, name
        assert json.dumps(after[name]) == json.dumps(before[name])
    updated = iso_utc(bench.clock.wall() + 120)
    status = {
        "updated": updated,
        "uploads": {
            **after,
            "audit": {"outcome": "rejected", "detail": "epoch 56: too old", "wall": 0.0},
        },
    }
    shown = "\n".join(lines(StatusDocument.from_json(status), (120, None)))
    assert "gate   BLOCKED 2 min ago: inner_step (15)" in shown
    assert "push   5.56.51 failed 2 min ago: the miner exited during the push" in shown
    assert "audit  rejected" in shown


def test_gate_inputs_that_cannot_be_written_are_reported_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gate, "write", refuse)
    bench.tick(61)
    bench.tick(61)
    assert len(bench.messages("disk_full")) == 1
    assert not bench.messages("guard_degraded")


# pushes are checked


def test_a_push_that_arrived_is_verified_by_a_probe_and_stored(bench: Bench) -> None:
    bench.look()
    assert bench.push("started") == []
    bench.clock.advance(12)
    assert bench.push("finished") == []
    bench.repo = Published(
        age_s=2.0, reason=None, outer_step=56, inner_step=51, size_bytes=900, checksum="c1" * 20
    )
    bench.tick()
    assert bench.messages("upload_succeeded") == [
        (
            "UPLOAD VERIFIED: tag 5.56.51 gradients 2s old, 900 bytes, checksum "
            "c1c1c1c1c1c1, pushed in 12.0s"
        )
    ]
    row = RunReader(bench.state.db).last("upload")
    assert row is not None
    assert (row["outcome"], row["bytes"], row["checksum"]) == ("verified", 900, "c1" * 20), (
        "the size of the gradients, as in the line"
    )
    assert row["verified"] is not None
    assert gate.read(bench.state.gate_inputs).published.age_s == 2.0


def test_a_push_that_did_not_arrive_is_checked_twice_and_refuted(bench: Bench) -> None:
    bench.look()
    bench.push("started")
    bench.clock.advance(12)
    bench.push("finished")
    bench.tick()
    assert bench.messages("upload_failed") == []
    bench.tick(4)
    (failed,) = bench.messages("upload_failed")
    assert failed.startswith(
        "UPLOAD FAILED: reported as pushed, but LastModified did not change: the "
        "gradients are 600s old"
    )
    assert "upload_succeeded" not in {f.name for f in bench.emitted}


@pytest.mark.parametrize(
    ("after", "name", "text"),
    [
        (
            Published(reason="no answer within 20 s"),
            "upload_unverified",
            "UPLOAD UNVERIFIED: tag 5.56.51: reported as pushed, but the repo could not be "
            "read: no answer within 20 s",
        ),
        (
            Published(age_s=1.0, reason=None, outer_step=57, inner_step=0, revision="5.57.0"),
            "upload_unverified",
            "UPLOAD REPORTED: tag 5.56.51 pushed in 12.0s; not verified: followed by "
            "5.57.0 before it was checked",
        ),
    ],
)
def test_a_push_that_cannot_be_checked_is_neither_verified_nor_failed(
    bench: Bench, after: Published, name: str, text: str
) -> None:
    bench.look()
    bench.push("started")
    bench.push("finished")
    bench.repo = after
    for _ in range(5):
        bench.tick(11)
    assert bench.messages(name) == [text]
    assert not {"upload_failed", "upload_succeeded"} & {f.name for f in bench.emitted}


def test_without_a_repo_a_push_is_reported_and_never_called_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch, repo="none")
    bench.push("started")
    (event,) = bench.push("finished")
    assert (
        event.text
        == "UPLOAD REPORTED: tag 5.56.51 pushed in 12.0s; not verified: no [repo] is configured"
    )


def test_a_push_that_only_the_miners_line_reports_is_checked(bench: Bench) -> None:
    bench.look()
    (reported,) = bench.monitor.on_lines([PUSHED.rstrip()])
    assert reported.fields["source"] == "log"
    bench.repo = Published(
        age_s=1.0, reason=None, outer_step=56, inner_step=51, revision="5.56.51", checksum="c1"
    )
    bench.tick()
    (verified,) = bench.messages("upload_succeeded")
    assert verified.startswith("UPLOAD VERIFIED: tag 5.56.51 gradients 1s old")
    assert verified.endswith("pushed, according to the miner's log")


def test_a_push_that_an_end_cuts_off_is_failed_and_one_left_unchecked_is_unverified(
    bench: Bench,
) -> None:
    bench.push("started")
    (failed,) = bench.monitor.on_exit(Exit(137, 9, False, False, 60.0))
    assert failed.text.startswith("UPLOAD FAILED: tag 5.56.51: the miner exited during the push")
    assert list(bench.monitor.on_exit(Exit(0, None, True, False, 60.0))) == []
    bench.push("started")
    bench.push("finished")
    (left,) = bench.monitor.on_stop()
    assert left.text.startswith(
        "UPLOAD UNVERIFIED: tag 5.56.51: the guard ended before the push was checked"
    )


# pushes known only from the miner's own lines

PUSHED = (
    b"2026-01-02 03:04:05 | INFO | Successfully pushed new model state with tag 5.56.51 to "
    b"bucket: b\n"
)
REPORTED = "UPLOAD REPORTED: tag 5.56.51 according to the miner's log"


@pytest.mark.parametrize(
    ("settings", "chunks", "messages"),
    [
        ({}, [b"loss 3.4\n" + PUSHED], [REPORTED]),
        ({}, [PUSHED[:60], PUSHED[60:]], [REPORTED]),
        ({"miner": {"profile": "sn38"}}, [PUSHED[:60], PUSHED[60:]], [REPORTED]),
        # Every rank reports it.
        ({}, [PUSHED, PUSHED], [REPORTED]),
        (
            {},
            [PUSHED, PUSHED.replace(b"5.56.51", b"5.56.61")],
            [REPORTED, REPORTED.replace("5.56.51", "5.56.61")],
        ),
        (
            {},
            [b"Model state upload failed: An error occurred (SlowDown)\n"],
            ["UPLOAD FAILED: the miner says: An error occurred (SlowDown)"],
        ),
        # Another monitor reads the lines, or there is no repo to check.
        ({"miner": {"attach": "log"}}, [PUSHED], []),
        ({"repo": {"kind": "none"}}, [PUSHED], []),
    ],
)
def test_a_push_is_reported_once_by_its_line_wherever_it_is_cut(
    tmp_path: Path, settings: dict[str, Any], chunks: list[bytes], messages: list[str]
) -> None:
    repo = {"kind": "local", "path": str(tmp_path), **settings.get("repo", {})}
    config = Config(miner=MinerSettings(**settings.get("miner", {})), repo=RepoSettings(**repo))
    monitor = module.UploadsMonitor(context(tmp_path, config=config, jobs=JobsNever()))
    assert [event.text for event in show(monitor, *chunks)] == messages
    list(monitor.on_entry(0, UploadEntry(phase="started")))
    later = PUSHED.replace(b"5.56.51", b"5.56.71")
    assert show(monitor, later) == [], "once a hook reports pushes, only the hook counts"
