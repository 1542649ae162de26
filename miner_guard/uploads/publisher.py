"""Publishes a revision: stages it in parallel, makes it visible in a few short requests, reads it
back.

Everything is in the repo, still invisible, before the first object becomes visible; then the
objects follow in order, the root metadata last. A publisher that dies before the first object
becomes visible has changed nothing; if it dies later, its recovery process
(`uploads.recovery_process`) finishes the upload, or, if that died too, the next publisher does.

What a reader sees in the meantime depends on the storage. The Hub switches a whole revision at
once. A folder and S3 switch one object at a time, under names that validators prescribe and that
two revisions of an outer step share, so no order of requests can switch them all together.
Guarantees there:

- The bytes arrive before the first name switches: the switch is a few short requests, however large
  the files (docs/figures.md has its duration), and if the publisher dies partway through, its
  successor completes the switch.
- Whatever the root metadata names exists. During the switch it may be older than the gradients,
  never newer: a validator reads complete new gradients under the previous inner step. A new outer
  step has new names, so its metadata comes first.
- The metadata lists the size and checksum of its gradients, so a reader can tell a mixed view from
  a complete one (`validators.metadata.mixed`). The guard's own probes and audit check this and
  retry.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from miner_guard.record.words import counted
from miner_guard.system.once import OncePer
from miner_guard.uploads.journal import COMMITTING, Journal, tickets_of
from miner_guard.uploads.repos.base import (
    CONFIG,
    GRADIENTS,
    METADATA,
    Differs,
    Missing,
    ObjectInfo,
    Repo,
    RepoError,
    StagedObject,
    epoch_key,
)
from miner_guard.validators.metadata import FILES, FileRecord

T = TypeVar("T")

_PARALLEL = 4
_STALE_LOOKS = 4
"""How many times to repeat a read that contradicts the write before believing it, with pauses of
0.5, 1, 2 and 4 s by default. Eventually consistent storage has lagged by two seconds."""
_PROGRESS_EVERY_S = 2.0


class Cancelled(Exception):
    """Cancelled before the revision became visible; the previous publication is unchanged."""


class PublishError(Exception):
    """The revision was not published or could not be verified. The message is human-readable."""


@dataclass(frozen=True)
class Revision:
    """Files published together."""

    folder: Path
    """Holds gradients.pt, config.json and metadata.json."""

    run: int
    outer_step: int
    inner_step: int

    @property
    def tag(self) -> str:
        """The revision's tag, such as `5.56.84`."""
        return f"{self.run}.{self.outer_step}.{self.inner_step}"

    def files(self) -> list[tuple[str, Path]]:
        """Key and file, in the order they become visible: the root metadata, where a validator
        starts, last."""
        names = (GRADIENTS, CONFIG, METADATA)
        return [(epoch_key(self.outer_step, n), self.folder / n) for n in names] + [
            (METADATA, self.folder / METADATA)
        ]


@dataclass(frozen=True)
class Retry:
    """How long to retry. Full jitter, as AWS recommends, so that many miners do not all retry at
    the same moment."""

    deadline_s: float = 600.0
    backoff_s: float = 0.5
    backoff_max_s: float = 20.0


@dataclass(frozen=True)
class Result:
    """The published revision, as read back."""

    tag: str
    label: str
    size_bytes: int
    """Size of gradients.pt: the file that validators download, and the size that the status pages
    show."""

    seconds: float
    attempts: int
    """Retried requests, plus one."""

    checksum: str | None
    """Checksum of gradients.pt, as reported by the repo."""


@dataclass
class _Effort:
    """Retries of one publication, counted across all its threads."""

    retry: Retry
    say: Callable[[str], None]
    cancelled: threading.Event
    start: float = field(default_factory=time.monotonic)
    attempts: int = 1

    def of(self, what: str, work: Callable[[], T], *, may_cancel: bool) -> T:
        pause = self.retry.backoff_s
        while True:
            try:
                return work()
            except RepoError as error:
                left = self.start + self.retry.deadline_s - time.monotonic()
                if not error.transient or left <= 0:
                    raise
                wait = min(random.uniform(0, pause) + 0.05, max(left, 0.0))
                self.say(f"{what}: {error}; trying again in {wait:.1f} s")
                if self.cancelled.wait(wait) and may_cancel:
                    raise Cancelled(f"cancelled while {what}") from error
                self.attempts += 1
                pause = min(2 * pause, self.retry.backoff_max_s)


class Publisher:
    """Publishes to one repo. The caller must hold `journal.exclusively`."""

    def __init__(
        self, repo: Repo, journal: Journal, say: Callable[[str], None], retry: Retry | None = None
    ) -> None:
        self._repo = repo
        self._journal = journal
        self._say = say
        self._retry = retry or Retry()
        self.cancelled = threading.Event()

    def recover(self) -> str | None:
        """Finish or undo a dead publisher's upload, if there is one. Returns a human-readable line
        about it, or None."""
        left = self._journal.read()
        if left is None:
            return None
        tickets = tickets_of(left)
        effort = self._effort()
        if left["phase"] == COMMITTING:
            effort.of(
                "finishing an upload",
                lambda: self._repo.commit(tickets, left["tag"]),
                may_cancel=False,
            )
            for ticket in tickets:
                effort.of("reading back", lambda t=ticket: self._repo.confirm(t), may_cancel=False)  # type: ignore[misc]
            self._journal.end()
            return f"Finished the upload with tag {left['tag']}, whose publisher had died"
        effort.of("undoing an upload", lambda: self._repo.abort(tickets), may_cancel=True)
        return None

    def publish(self, revision: Revision) -> Result:
        """Publish and verify. Raises PublishError or Cancelled.

        Until the first object becomes visible, the previous revision stays complete. An error after
        that point says that the two may be mixed; the journal keeps everything that the next
        publisher needs to finish.
        """
        effort = self._effort()
        missing = [str(path) for _, path in revision.files() if not path.is_file()]
        if missing:
            raise PublishError(
                f"nothing published: missing {', '.join(missing)}; stage all files first"
            )
        try:
            self._settle_earlier()
            tickets = self._staged(revision, effort)
            self._journal.committing(tickets)
            entries = self._shown(revision, tickets, effort)
        except RepoError as error:
            raise PublishError(str(error)) from error
        except OSError as error:
            # This error comes from the journal or the miner's own files, because a repo reports
            # file errors as RepoError.
            raise PublishError(
                f"{error.filename or self._journal.path}: {error.strerror or error}"
            ) from error
        self._journal.end()
        gradients, seconds = entries[0], time.monotonic() - effort.start
        return Result(
            revision.tag,
            self._repo.label,
            gradients.size_bytes,
            seconds,
            effort.attempts,
            gradients.checksum,
        )

    def _shown(
        self, revision: Revision, tickets: Sequence[StagedObject], effort: _Effort
    ) -> list[ObjectInfo]:
        """Make the revision visible and read it back. Raises RepoError."""
        try:
            effort.of(
                "making the upload visible",
                lambda: self._repo.commit(tickets, revision.tag),
                may_cancel=False,
            )
        except RepoError as error:
            raise RepoError(
                f"{error}; this happened while tag {revision.tag} was being made visible, so the "
                "published files may be a mix of two revisions; publish again"
            ) from error
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="read") as pool:
            return list(pool.map(partial(self._read_back, effort=effort), tickets))

    def _read_back(self, ticket: StagedObject, effort: _Effort) -> ObjectInfo:
        """Read back the committed object and compare it with what was staged. A difference may be
        a stale read, so retry up to `_STALE_LOOKS` times, with growing pauses, before raising."""
        pause = effort.retry.backoff_s
        for _ in range(_STALE_LOOKS):
            try:
                return effort.of(
                    "reading back", partial(self._repo.confirm, ticket), may_cancel=False
                )
            except (Differs, Missing):
                time.sleep(pause)
                pause *= 2
        return effort.of("reading back", partial(self._repo.confirm, ticket), may_cancel=False)

    def _settle_earlier(self) -> None:
        try:
            if line := self.recover():
                self._say(line)
        except RepoError as error:
            if error.transient:
                raise
            # The staged data is gone, or these credentials cannot access it; raising would block
            # every later upload.
            self._say(f"An earlier upload can't be finished ({error}); this upload replaces it")

    def _effort(self) -> _Effort:
        return _Effort(self._retry, self._say, self.cancelled)

    def _staged(self, revision: Revision, effort: _Effort) -> list[StagedObject]:
        files = revision.files()
        earlier = self._journal.read()
        same = earlier is not None and earlier["tag"] == revision.tag
        self._journal.begin(revision.tag, earlier["notes"] if same and earlier is not None else {})
        if not same:
            swept = effort.of("cleaning up", self._repo.sweep, may_cancel=True)
            if swept:
                self._say(f"Removed {counted(swept, 'object')} left over from an unfinished upload")
        meter = _Meter(sum(p.stat().st_size for _, p in files), self._say, self.cancelled)
        content = [(key, path) for key, path in files if path.name != METADATA]
        tickets, failed = self._together(content, effort, meter)
        if failed is None:
            metadata = self._metadata(revision, tickets)
            more, failed = self._together(
                [(key, metadata) for key, p in files if p.name == METADATA], effort, meter
            )
            tickets += more
        if isinstance(failed, Cancelled) or self.cancelled.is_set():
            self._undo(tickets)
            raise Cancelled(
                f"upload with tag {revision.tag} cancelled; the previous publication is unchanged"
            )
        if failed is not None:
            raise failed
        return tickets

    def _together(
        self, files: Sequence[tuple[str, Path]], effort: _Effort, meter: _Meter
    ) -> tuple[list[StagedObject], BaseException | None]:
        """Stage in parallel: the staged objects in order, and the first error. By the time it
        returns, all transfers have ended."""
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="stage") as pool:
            waiting = [pool.submit(self._stage, key, path, effort, meter) for key, path in files]
        failed = [error for w in waiting if (error := w.exception()) is not None]
        return [w.result() for w in waiting if w.exception() is None], next(iter(failed), None)

    def _metadata(self, revision: Revision, tickets: Sequence[StagedObject]) -> Path:
        """The miner's metadata.json plus the size and checksum of its files. Anything but a JSON
        object is published unchanged."""
        own = revision.folder / METADATA
        try:
            document = json.loads(own.read_bytes())
        except ValueError:
            return own
        if not isinstance(document, dict):
            return own
        described = {
            t.key.rpartition("/")[2]: asdict(FileRecord(t.size_bytes, t.checksum)) for t in tickets
        }
        path = self._journal.path.with_suffix(f".{METADATA}")
        path.write_text(json.dumps({**document, FILES: described}))
        return path

    def _stage(self, key: str, path: Path, effort: _Effort, meter: _Meter) -> StagedObject:
        notes = self._journal.notes_of(key)

        def staged() -> StagedObject:
            return self._repo.stage(key, path, meter.add, notes)

        return effort.of(f"sending {key}", staged, may_cancel=True)

    def _undo(self, tickets: Sequence[StagedObject]) -> None:
        try:
            self._repo.abort(tickets)
            self._repo.sweep()
        except RepoError as error:
            self._say(
                "Cannot remove the data already sent, which stays invisible; the next upload "
                f"removes it: {error}"
            )
        self._journal.end()


class _Meter:
    """Progress of one publication: prints a line periodically and checks for cancellation."""

    def __init__(self, size: int, say: Callable[[str], None], cancelled: threading.Event) -> None:
        self._size = size
        self._say = say
        self._cancelled = cancelled
        self._mutex = threading.Lock()
        self._done = 0
        self._lines = OncePer(_PROGRESS_EVERY_S)
        self._lines.ask(time.monotonic())

    def add(self, count: int) -> None:
        """Count the bytes transferred. Raises Cancelled."""
        if self._cancelled.is_set():
            raise Cancelled("cancelled")
        with self._mutex:
            self._done += count
            if not self._lines.ask(time.monotonic()):
                return
            line = f"Uploaded {self._done / 1e6:.1f} of {self._size / 1e6:.1f} MB"
        self._say(line)
