"""Pushes known only from the miner's own lines: the monitor reads the lines unless a hook reports
pushes as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import Config, MinerSettings, RepoSettings
from miner_guard.eventlog.catalog import message
from miner_guard.rank.journal import DecisionEntry, UploadEntry
from miner_guard.watch.uploads import PrintedUploadsMonitor
from tests.support.contexts import context
from tests.support.output import show

PUSHED = (
    b"2026-01-02 03:04:05 | INFO | Successfully pushed new model state with tag 5.56.51 to "
    b"bucket: b\n"
)


def monitor(
    folder: Path, profile: str | None = None, attach: Any = None, repo: Any = "local"
) -> PrintedUploadsMonitor:
    config = Config(
        miner=MinerSettings(profile=profile, attach=attach),
        repo=RepoSettings(kind=repo, path=str(folder)),
    )
    return PrintedUploadsMonitor(context(folder, config=config))


def messages(monitor: PrintedUploadsMonitor, *chunks: bytes) -> list[str]:
    events = show(monitor, *chunks)
    assert all(event.fields["source"] == "log" for event in events)
    return [message(event) for event in events]


@pytest.mark.parametrize("profile", [None, "sn38"])
def test_a_push_is_reported_by_its_line_wherever_it_is_cut(
    tmp_path: Path, profile: str | None
) -> None:
    reported = ["UPLOAD REPORTED: tag 5.56.51 according to the miner's log"]
    assert messages(monitor(tmp_path, profile), b"loss 3.4\n" + PUSHED) == reported
    assert messages(monitor(tmp_path, profile), PUSHED[:60], PUSHED[60:]) == reported


def test_a_push_that_every_rank_reports_is_one(tmp_path: Path) -> None:
    one = monitor(tmp_path)
    assert len(messages(one, PUSHED, PUSHED)) == 1
    assert len(messages(one, PUSHED.replace(b"5.56.51", b"5.56.61"))) == 1


def test_the_miners_own_word_that_it_failed_is_a_failure(tmp_path: Path) -> None:
    text = b"Model state upload failed: An error occurred (SlowDown)\n"
    assert messages(monitor(tmp_path), text) == [
        "UPLOAD FAILED: the miner says: An error occurred (SlowDown)"
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"wandb: Successfully pushed metrics to the run\n",
        b"Uploading model state, 45% done\n",
        b"Successfully pushed docker image model-server:12\n",
    ],
)
def test_lines_that_push_no_model_are_ignored(tmp_path: Path, text: bytes) -> None:
    assert messages(monitor(tmp_path), text) == []


def test_once_a_hook_reports_pushes_only_the_hook_counts(tmp_path: Path) -> None:
    one = monitor(tmp_path)
    assert not list(one.on_entry(0, DecisionEntry(decision={})))
    assert not list(one.on_entry(0, UploadEntry(phase="started")))
    assert messages(one, PUSHED) == []


@pytest.mark.parametrize("settings", [{"attach": "log"}, {"repo": "none"}])
def test_a_line_that_another_monitor_reads_or_no_repo_to_check_is_not_reported(
    tmp_path: Path, settings: Any
) -> None:
    assert messages(monitor(tmp_path, **settings), PUSHED) == []
