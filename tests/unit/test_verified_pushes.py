"""The uploads monitor checks that each reported push arrived."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.eventlog.catalog import make_finding, message
from miner_guard.record.store import RunReader
from miner_guard.uploads import gate
from miner_guard.validators.facts import Published
from miner_guard.watch.base import Exit
from tests.support.uploads_harness import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_push_that_arrived_is_verified_by_a_probe_and_stored(bench: Bench) -> None:
    bench.look()
    assert [f.name for f in bench.push("started")] == ["upload_started"]
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


def test_a_push_into_a_repo_that_is_silent_is_unverified_not_failed_and_not_verified(
    bench: Bench,
) -> None:
    bench.look()
    bench.push("started")
    bench.push("finished")
    bench.repo = Published(reason="no answer within 20 s")
    for _ in range(5):
        bench.tick(11)
    assert bench.messages("upload_unverified") == [
        (
            "UPLOAD UNVERIFIED: tag 5.56.51: reported as pushed, but the repo could not be "
            "read: no answer within 20 s"
        )
    ]
    assert not {"upload_failed", "upload_succeeded"} & {f.name for f in bench.emitted}


def test_a_push_that_the_next_one_replaced_is_neither_verified_nor_failed(bench: Bench) -> None:
    bench.look()
    bench.push("started")
    bench.push("finished")
    bench.repo = Published(age_s=1.0, reason=None, outer_step=57, inner_step=0, revision="5.57.0")
    bench.tick()
    assert bench.messages("upload_reported") == [
        (
            "UPLOAD REPORTED: tag 5.56.51 pushed in 12.0s; not verified: followed by "
            "5.57.0 before it was checked"
        )
    ]
    assert bench.tick(20) == []
    assert not {"upload_failed", "upload_succeeded"} & {f.name for f in bench.emitted}


def test_without_a_repo_a_push_is_reported_and_never_called_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch, repo="none")
    bench.push("started")
    (event,) = bench.push("finished")
    assert (
        message(event)
        == "UPLOAD REPORTED: tag 5.56.51 pushed in 12.0s; not verified: no [repo] is configured"
    )


def test_a_push_that_only_the_log_reports_is_verified_too(bench: Bench) -> None:
    bench.look()
    assert not bench.entry(
        kind="upload",
        phase="finished",
        decision_id="",
        outer_step=56,
        inner_step=51,
        tag="5.56.51",
        seconds=None,
    )
    bench.tick()
    bench.tick(4)
    assert len(bench.messages("upload_failed")) == 1


def test_a_push_that_only_the_miners_line_reports_is_checked(bench: Bench) -> None:
    bench.look()
    printed = make_finding(
        "upload_reported", tag="5.56.51", detail="according to the miner's log", source="log"
    )
    assert not list(bench.monitor.on_event(printed))
    bench.repo = Published(
        age_s=1.0, reason=None, outer_step=56, inner_step=51, revision="5.56.51", checksum="c1"
    )
    bench.tick()
    (verified,) = bench.messages("upload_succeeded")
    assert verified.startswith("UPLOAD VERIFIED: tag 5.56.51 gradients 1s old")
    assert verified.endswith("pushed, according to the miner's log")


def test_a_push_that_failed_says_why(bench: Bench) -> None:
    bench.push("started")
    (failed,) = bench.entry(
        kind="upload",
        phase="failed",
        decision_id="d1",
        outer_step=56,
        inner_step=51,
        error="503 SlowDown",
        seconds=3.0,
    )
    assert message(failed) == "UPLOAD FAILED: tag 56.51: 503 SlowDown"


def test_a_push_that_the_miners_end_cuts_off_is_failed(bench: Bench) -> None:
    bench.push("started")
    (failed,) = bench.monitor.on_exit(Exit(137, 9, False, False, 60.0))
    assert message(failed).startswith(
        "UPLOAD FAILED: tag 5.56.51: the miner exited during the push"
    )
    assert list(bench.monitor.on_exit(Exit(0, None, True, False, 60.0))) == []


def test_a_push_that_could_not_be_checked_before_the_end_is_unverified(bench: Bench) -> None:
    bench.push("started")
    bench.push("finished")
    (left,) = bench.monitor.on_stop()
    assert message(left).startswith(
        "UPLOAD UNVERIFIED: tag 5.56.51: the guard ended before the push was checked"
    )
