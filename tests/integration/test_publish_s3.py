"""Publishing to S3: complete or not at all, read back, and with a clear line for everything that
can go wrong."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.journal import Journal, journal_path
from miner_guard.uploads.publisher import Cancelled, Publisher, PublishError, Retry, Revision
from miner_guard.uploads.push import push
from miner_guard.uploads.repos import look_at, open_repo
from miner_guard.uploads.repos.base import RepoError, epoch_key
from miner_guard.validators.metadata import mixed
from tests.servers import s3
from tests.servers.killing import publishers, wait_for_the_recovery
from tests.servers.revisions import inner_step_of, revision
from tests.support import requires

BUCKET = "llama-4b-ws-4-007"
MANY = 12 * 1024 * 1024
"""Bytes: more than one part."""


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    s3.keys(monkeypatch)


@pytest.fixture
def server() -> Iterator[tuple[RepoSettings, s3.Faults]]:
    with s3.bucket(BUCKET) as (settings, faults):
        yield settings, faults


def publish(
    settings: RepoSettings, what: Revision, folder: Path, retry: Retry | None = None
) -> list[str]:
    lines: list[str] = []
    repo = open_repo(settings)
    Publisher(repo, Journal(journal_path(folder, repo.label)), lines.append, retry).publish(what)
    return lines


def view(settings: RepoSettings) -> set[int]:
    """The inner steps that a validator's three files come from: just one if the revision is
    complete."""
    repo = open_repo(settings)
    metadata = json.loads(repo.get("metadata.json"))
    config = json.loads(repo.get(epoch_key(metadata["outer_step"], "config.json")))
    gradients = repo.get(epoch_key(metadata["outer_step"], "gradients.pt"), 64 * 1024 * 1024)
    return {metadata["inner_step"], config["block_list"][0], inner_step_of(gradients)}


def test_published_is_what_a_validator_finds(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, _ = server
    assert look_at(settings).empty
    result = push(settings, revision(tmp_path, 50, MANY), tmp_path, lambda _line: None)
    seen = look_at(settings)
    assert (seen.revision, seen.inner_step, seen.config) == ("1.3.50", 50, {"block_list": [50]})
    assert seen.checksum == result.checksum
    assert seen.age_s is not None
    assert seen.age_s < 60


def test_a_push_is_reported_after_the_read_back_and_shows_no_key(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    lines: list[str] = []
    push(settings, revision(tmp_path, 50), tmp_path, lines.append)
    assert "Successfully pushed new model state with tag 1.3.50 to bucket:" in lines[-1]
    assert faults.requests[-1].startswith("HEAD")
    assert s3.KEYS["AWS_SECRET_ACCESS_KEY"] not in "\n".join(lines)


def test_at_every_moment_the_view_is_complete_or_known_to_be_mixed(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    publish(settings, revision(tmp_path, 50), tmp_path)
    repo, looking, seen = open_repo(settings), threading.Lock(), []

    def look(_number: int) -> None:
        # The probe's own requests arrive here too, as do those of the publisher that are answered
        # in the meantime.
        if looking.acquire(blocking=False):
            with contextlib.ExitStack() as stack:
                stack.callback(looking.release)
                metadata, entry = (
                    json.loads(repo.get("metadata.json")),
                    repo.head("epoch-3/gradients.pt"),
                )
                gradients = inner_step_of(repo.get(entry.key))
                torn = mixed(metadata, entry.size_bytes, entry.checksum) is not None
                seen.append((metadata["inner_step"], gradients, torn))

    faults.after = look
    publish(settings, revision(tmp_path, 60), tmp_path)
    faults.after = lambda _n: None
    assert set(seen) == {(50, 50, False), (50, 60, True), (60, 60, False)}


def test_age_is_the_servers_age_whatever_this_hosts_clock(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    faults.shift_s = -7200.0
    publish(settings, revision(tmp_path, 50), tmp_path)
    assert (look_at(settings).age_s or 0.0) < 60


@pytest.mark.slow
def test_killed_after_any_request_the_view_is_complete(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    """Walks through the publisher's requests: SIGKILL once the server has processed the k-th but
    has not answered it."""
    settings, faults = server
    publish(settings, revision(tmp_path, 1000), tmp_path)
    outcomes = []
    with publishers(settings, "boto3", tmp_path) as publisher:
        for number in range(1, 60):
            before = view(settings)
            ended = publisher.push_and_kill(faults, revision(tmp_path, 1000 + number), number)
            wait_for_the_recovery(open_repo(settings).label, tmp_path)
            after = view(settings)
            assert len(after) == 1, (
                f"killed after request {number}: {faults.requests[-1]}, the view is mixed: {after}"
            )
            outcomes.append(after == before)
            if ended:
                break
        else:
            pytest.fail("the publisher never got to its end")
    # Before the point of no return the old revision stays; after it, the new one gets completed.
    # The test has covered both.
    assert outcomes[0]
    assert outcomes.index(False) > 3
    assert not any(outcomes[outcomes.index(False) :])
    assert outcomes.count(False) > 3


def test_if_the_recovery_process_died_too_the_next_publisher_finishes(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, _ = server
    publish(settings, revision(tmp_path, 50), tmp_path)

    class Died(BaseException):
        pass

    class DiesWhileShowing:
        def __init__(self) -> None:
            self._repo = open_repo(settings)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._repo, name)

        def commit(self, tickets: list[Any], tag: str) -> None:
            self._repo.commit(tickets[:1], tag)
            raise Died

    journal = Journal(journal_path(tmp_path, open_repo(settings).label))
    repo: Any = DiesWhileShowing()
    with pytest.raises(Died):
        Publisher(repo, journal, lambda _l: None).publish(revision(tmp_path, 60))
    assert view(settings) == {50, 60}
    line = Publisher(open_repo(settings), journal, lambda _l: None).recover()
    assert line == "Finished the upload with tag 1.3.60, whose publisher had died"
    assert view(settings) == {60}


def test_data_that_arrived_is_not_sent_again(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    what = revision(tmp_path, 50, 40 * 1024 * 1024)
    repo = open_repo(settings)
    journal = Journal(journal_path(tmp_path, repo.label))

    def refuse_after_a_part(number: int) -> None:
        if "partNumber" in faults.requests[number - 1]:
            faults.refuse = (500, "InternalError")

    faults.after = refuse_after_a_part
    with pytest.raises(PublishError):
        Publisher(repo, journal, lambda _l: None, Retry(deadline_s=0.0)).publish(what)
    sent = _parts_sent(faults)
    faults.after, faults.refuse = lambda _n: None, None
    faults.requests.clear()
    Publisher(repo, journal, lambda _l: None).publish(what)
    assert 0 < _parts_sent(faults) < 6
    assert sent > 0
    assert view(settings) == {50}
    assert s3.client(settings).list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def _parts_sent(faults: s3.Faults) -> int:
    return sum("PUT" in r and "partNumber" in r for r in faults.requests)


def test_leftovers_of_another_revision_are_aborted(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, _ = server
    client = s3.client(settings)
    client.create_multipart_upload(Bucket=BUCKET, Key="epoch-2/gradients.pt")
    client.create_multipart_upload(Bucket=BUCKET, Key="somebody/elses.bin")
    lines = publish(settings, revision(tmp_path, 50), tmp_path)
    assert "Removed 1 object left over from an unfinished upload" in lines
    left = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [u["Key"] for u in left] == ["somebody/elses.bin"]


def test_a_storm_of_503_is_survived_and_reported(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    faults.slow_downs = 12
    lines = publish(
        settings, revision(tmp_path, 50), tmp_path, Retry(backoff_s=0.02, backoff_max_s=0.2)
    )
    assert any("busy (503 SlowDown); trying again in" in line for line in lines)
    assert view(settings) == {50}


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ((403, "InvalidAccessKeyId"), "rejected the keys"),
        ((403, "SignatureDoesNotMatch"), "rejected the keys"),
        ((404, "NoSuchBucket"), f"bucket {BUCKET} does not exist"),
        ((403, "RequestTimeTooSkewed"), "this host's clock is wrong"),
        ((503, "SlowDown"), "busy (503 SlowDown)"),
    ],
)
def test_each_refusal_is_one_clear_sentence(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path, refuse: tuple[int, str], words: str
) -> None:
    settings, faults = server
    publish(settings, revision(tmp_path, 50), tmp_path)
    faults.refuse = refuse
    start = time.monotonic()
    with pytest.raises(PublishError, match=words.replace("(", r"\(").replace(")", r"\)")):
        publish(settings, revision(tmp_path, 60), tmp_path, Retry(deadline_s=2.0))
    assert time.monotonic() - start < 60
    with pytest.raises(RepoError, match=words.replace("(", r"\(").replace(")", r"\)")):
        open_repo(settings).state()
    faults.refuse = None
    assert view(settings) == {50}


def test_a_silent_server_costs_the_deadline_and_no_more(tmp_path: Path) -> None:
    with s3.silent() as endpoint:
        settings = RepoSettings(kind="s3", bucket=BUCKET, endpoint=endpoint, timeout_s=3.0)
        start = time.monotonic()
        seen = look_at(settings)
        assert (seen.age_s, seen.empty) == (None, False)
        # On a busy machine, the probe's own deadline may pass first.
        assert re.search("no response from|no answer within 3 s", str(seen.reason))
        with pytest.raises(PublishError, match="no response from the storage"):
            publish(settings, revision(tmp_path, 50), tmp_path, Retry(deadline_s=3.0))
        assert time.monotonic() - start < 90, "6 s are meant, of a server that never answers"


def test_half_closed_connections_are_retried_and_then_reported(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    publish(settings, revision(tmp_path, 50), tmp_path)
    faults.half_close = True
    with pytest.raises(RepoError) as error:
        open_repo(settings).state()
    assert error.value.transient
    faults.half_close = False
    assert open_repo(settings).state().inner_step == 50


def test_a_cancelled_upload_leaves_the_old_revision_and_nothing_else(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    publish(settings, revision(tmp_path, 50), tmp_path)
    repo = open_repo(settings)
    publisher = Publisher(repo, Journal(journal_path(tmp_path, repo.label)), lambda _l: None)
    faults.requests.clear()
    faults.after = lambda number: publisher.cancelled.set() if number == 2 else None
    with pytest.raises(Cancelled, match="the previous publication is unchanged"):
        publisher.publish(revision(tmp_path, 60, MANY))
    faults.after = lambda _n: None
    assert view(settings) == {50}
    assert s3.client(settings).list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_never_two_at_once_and_no_key_on_a_command_line(
    server: tuple[RepoSettings, s3.Faults], tmp_path: Path
) -> None:
    settings, faults = server
    faults.requests.clear()
    faults.silent.set()
    first = threading.Thread(
        target=lambda: push(settings, revision(tmp_path, 50), tmp_path, lambda _l: None)
    )
    first.start()
    while not faults.requests:
        time.sleep(0.02)
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    for module in ("miner_guard.uploads.push", "miner_guard.uploads.recovery_process"):
        assert any(module in command for command in commands)
    assert not any(key in command for command in commands for key in s3.KEYS.values()), (
        "a key on a command line"
    )
    with pytest.raises(
        PublishError, match="Previous upload still in progress, skipping new upload"
    ):
        push(settings, revision(tmp_path, 60), tmp_path, lambda _l: None)
    faults.silent.clear()
    first.join()
    assert view(settings) == {50}


def test_an_independent_server_agrees_and_really_checks_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served" / BUCKET).mkdir(parents=True)
    with s3.rclone(requires.tool("rclone"), tmp_path / "served") as endpoint:
        settings = RepoSettings(
            kind="s3", bucket=BUCKET, endpoint=endpoint, region="us-east-1", timeout_s=20.0
        )
        for inner in (50, 60):
            publish(settings, revision(tmp_path, inner, 20 * 1024 * 1024), tmp_path)
            assert view(settings) == {inner}
        assert open_repo(settings).state().revision == "1.3.60"
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
        with pytest.raises(RepoError, match="rejected the keys"):
            open_repo(settings).state()
