"""Compares publishing to a local S3 server with `boto3.upload_file` and `rclone copy`, in
alternating runs with the same file."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from miner_guard.config import RepoSettings
from miner_guard.uploads.journal import Journal, journal_path
from miner_guard.uploads.publisher import Publisher, Revision
from miner_guard.uploads.push import push
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import METADATA, Repo, StagedObject
from miner_guard.uploads.repos.s3 import S3Repo
from tests.benchmarks.frame import Row
from tests.servers import s3
from tests.servers.revisions import revision

TITLE = "Publishing"
BUCKET = "llama-4b-ws-4-007"
SIZE_MB = int(os.environ.get("BENCH_PUBLISH_MB", "1024"))
ROUNDS = 3


def run() -> list[Row]:
    """Publishes 1 GiB by default (BENCH_PUBLISH_MB) to two servers, each in a separate process,
    that hash differently.

    moto's ETag is the digest of the parts' digests, as with R2 and S3, so comparing it requires no
    hashing. rclone's is the md5 of the whole object: rclone computes it on first request, and the
    publisher then computes it for the local file.
    """
    os.environ.update(s3.KEYS)
    with (
        tempfile.TemporaryDirectory(prefix="bench-publish-") as name,
        s3.moto_apart() as (endpoint, _),
    ):
        rows = _rows(Path(name), endpoint, "moto, ETag as R2's")
    program = _rclone()
    if program is None or not _serves_s3(program):
        why = "rclone is not installed" if program is None else "this rclone has no `serve s3`"
        return [*rows, Row("to rclone serve s3", None, "s", note=why)]
    with tempfile.TemporaryDirectory(prefix="bench-publish-") as name:
        served = Path(name, "served")
        served.mkdir()
        with s3.rclone(program, served) as endpoint:
            return rows + _rows(Path(name), endpoint, "rclone serve s3, ETag of the whole")


def _rclone() -> str | None:
    import shutil
    import sys

    return shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")


def _serves_s3(program: str) -> bool:
    """Whether rclone can serve S3, which needs version 1.65 or later; Debian 12 ships 1.60."""
    return "\n  s3 " in _run([program, "serve", "--help"], {}).stdout


def _run(command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    # rclone fails if a certificate bundle is configured, even without TLS.
    own = {name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"}
    return subprocess.run(command, env=own | dict(env), capture_output=True, text=True)


def _copy(program: str, source: str, endpoint: str) -> None:
    """`rclone copyto` with its defaults: parts of 5 MiB, four at a time."""
    prefix = "RCLONE_CONFIG_BENCH_"
    env = {f"{prefix}TYPE": "s3", f"{prefix}PROVIDER": "Other", f"{prefix}ENV_AUTH": "true"}
    env |= {f"{prefix}ENDPOINT": endpoint, f"{prefix}REGION": "us-east-1"}
    env |= {f"{prefix}FORCE_PATH_STYLE": "true", f"{prefix}NO_CHECK_BUCKET": "true"}
    done = _run([program, "copyto", "--ignore-times", source, f"bench:{BUCKET}/copy.pt"], env)
    if done.returncode != 0:
        raise RuntimeError(f"rclone could not copy: {done.stderr[-500:]}")


def _rows(folder: Path, endpoint: str, server: str) -> list[Row]:
    settings = RepoSettings(
        kind="s3", bucket=BUCKET, endpoint=endpoint, region="us-east-1", timeout_s=300.0
    )
    client, what = s3.client(settings), revision(folder, 50, SIZE_MB * 1024 * 1024)
    client.create_bucket(Bucket=BUCKET)
    repo = open_repo(settings)
    assert isinstance(repo, S3Repo)
    source = str(what.folder / "gradients.pt")
    switch = _Switch(repo)
    program = _rclone()
    alone, seen, ours, copied = [], [], [], []
    for _ in range(ROUNDS):
        alone.append(_taken(lambda: client.upload_file(source, BUCKET, "alone.pt")))
        # The minimum cost of reading back: some servers hash the whole object on the first request
        # for it.
        seen.append(alone[-1] + _taken(lambda: client.head_object(Bucket=BUCKET, Key="alone.pt")))
        if program is not None:
            copied.append(_taken(partial(_copy, program, source, endpoint)))
        ours.append(_taken(lambda: _publish(repo, what, folder)))
    child = _taken(lambda: push(settings, what, folder, lambda _l: None))
    note = f"{SIZE_MB} MiB to {server}, median of {ROUNDS}"
    return [
        Row("boto3.upload_file alone", statistics.median(t.wall_s for t in alone), "s", note=note),
        Row(
            "Publisher.publish: 4 files, shown, read back",
            statistics.median(t.wall_s for t in ours),
            "s",
        ),
        _speed("speed against upload_file alone", alone, ours, ">= 0.9 ×"),
        _speed("speed against that and a HEAD", seen, ours),
        _speed("speed against rclone copy", copied, ours, ">= 0.9 ×")
        if copied
        else Row("speed against rclone copy", None, "×", note="rclone is not installed"),
        Row(
            "from the first object shown to the last", 1000 * statistics.median(switch.took_s), "ms"
        ),
        Row(
            "the same from a child (`push`)",
            child.wall_s,
            "s",
            note="interpreter and boto3 included",
        ),
    ]


@dataclass(frozen=True)
class _Taken:
    wall_s: float
    cpu_s: float
    """CPU seconds of this process and of the server: on a busy machine a better measure than wall
    time."""

    def __add__(self, other: _Taken) -> _Taken:
        return _Taken(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def _speed(what: str, theirs: list[_Taken], ours: list[_Taken], target: str = "") -> Row:
    wall = statistics.median(t.wall_s for t in theirs) / statistics.median(t.wall_s for t in ours)
    cpu = statistics.median(t.cpu_s for t in theirs) / statistics.median(t.cpu_s for t in ours)
    return Row(
        what, wall, "×", target=target, note=f"{cpu:.2f} × by processor time, client and server"
    )


def _taken(work: Callable[[], object]) -> _Taken:
    wall, cpu = time.perf_counter(), _processor_s()
    work()
    return _Taken(time.perf_counter() - wall, _processor_s() - cpu)


def _processor_s() -> float:
    return time.process_time() + sum(sum(c.cpu_times()[:2]) for c in psutil.Process().children())


class _Switch:
    """How long each switch to a new revision took, from the first visible object to the last."""

    def __init__(self, repo: S3Repo) -> None:
        self._show = repo._show
        self._shown: list[float] = []
        self.took_s: list[float] = []
        setattr(repo, "_show", self._watched)  # noqa: B010 - mypy takes no assigned method

    def _watched(self, ticket: StagedObject) -> None:
        self._show(ticket)
        self._shown.append(time.perf_counter())
        if ticket.key == METADATA:
            self.took_s.append(self._shown[-1] - self._shown[0])
            self._shown.clear()


def _publish(repo: Repo, what: Revision, folder: Path) -> None:
    Publisher(repo, Journal(journal_path(folder, repo.label)), lambda _l: None).publish(what)
