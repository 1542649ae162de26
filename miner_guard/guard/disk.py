"""Writes the guard's files in threads, so that the guard never waits for the disk.

Each kind of file has a lane: a queue, and a thread that writes its contents in order. A lane holds
up to 8 MiB of unwritten data; beyond that it drops the oldest and counts it. A thread that is stuck
in the kernel on a dead disk (D state) keeps the guard's process from exiting, but not the keeper,
which owns the miner and waits a few seconds only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.config import LogSettings
from miner_guard.record.emitter import JsonlSink, render_json
from miner_guard.record.events import Event, degraded, event, write_failed
from miner_guard.record.store import RunStore
from miner_guard.record.words import counted
from miner_guard.state_dir import PRIVATE_FILE, StateDir, replace_file

STUCK_S = 5.0
"""The disk counts as unresponsive if a write has taken this long."""

MAX_WAITING_BYTES = 8 * 1024 * 1024
"""Limit per kind of file. For comparison: an hour of log at one line per second is 1 MiB."""

_LOOK_EVERY_S = 1.0
_RETRY_S = 1.0
_MAX_BATCH = 64
_COMMIT_EVERY_S = 0.05

Report = Callable[[Event], None]


@dataclass
class _Message:
    """One write; only the fields of its lane are set."""

    file: str
    size: int
    line: str = ""
    path: Path | None = None
    """The file to replace; a later message for the same path makes this one obsolete."""

    data: bytes | None = None
    """The file's new content; None removes it."""

    mode: int | None = None
    """The file's mode; None overwrites it in place."""

    row: tuple[str, Sequence[Any]] = ("", ())
    then: Callable[[], None] | None = None
    """Called after the write."""

    settled: bool = False
    """Whether the message was written, dropped, or made obsolete."""


class _Log:
    """Writes guard.jsonl."""

    unfinished = False

    def __init__(self, state: StateDir, logs: LogSettings, report: Report) -> None:
        self._sink = JsonlSink(state.log, logs, report)

    def write(self, message: _Message) -> None:
        self._sink.append(message.line)

    def idle(self) -> None: ...

    def close(self) -> None:
        self._sink.close()


class _Files:
    """Replaces, overwrites or removes whole files. Retries a failed write until it succeeds or a
    newer message for the same file makes it obsolete."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._waiting: dict[Path, _Message] = {}
        self._outdated = 0
        self._named = ""
        """The file that the outage report names; the recovery report names the same one."""

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting)

    def write(self, message: _Message) -> None:
        assert message.path is not None
        self._outdated += self._waiting.pop(message.path, None) is not None
        first = not self._waiting
        try:
            _put(message.path, message)
        except OSError as error:
            self._waiting[message.path] = message
            if first:
                self._named = message.file
                self._report(write_failed(message.file, error))

    def idle(self) -> None:
        """Retry failed writes."""
        for path, message in list(self._waiting.items()):
            with contextlib.suppress(OSError):
                _put(path, message)
                del self._waiting[path]
                if not self._waiting:
                    lost, self._outdated = self._outdated, 0
                    self._report(_recovered(self._named, lost))

    def close(self) -> None:
        self.idle()


def _put(path: Path, message: _Message) -> None:
    if message.data is None or message.mode is not None:
        replace_file(path, message.data, message.mode or PRIVATE_FILE)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, message.data, 0)
        os.ftruncate(fd, len(message.data))
    finally:
        os.close(fd)


class _Rows:
    """Writes run.db. The rows of a batch share a transaction, because a commit waits for the
    disk."""

    def __init__(self, state: StateDir, report: Report) -> None:
        self._store = RunStore(state.db, report)

    @property
    def unfinished(self) -> bool:
        return self._store.waiting > 0

    def write(self, message: _Message) -> None:
        self._store.queue(message.row)

    def idle(self) -> None:
        self._store.retry()

    def close(self) -> None:
        self._store.close()


_Writer = _Log | _Files | _Rows


@dataclass
class _Lane:
    """One kind of file."""

    make: Callable[[], _Writer]
    batch: int = 1
    """How many messages are written before the writer's `idle` and a pause."""

    waiting: deque[_Message] = field(default_factory=deque)
    writing: list[_Message] = field(default_factory=list)
    size: int = 0
    since: float = 0.0
    """Monotonic time at which the current write began."""

    lost: int = 0
    stuck: bool = False
    closed: bool = False

    def add(self, message: _Message) -> None:
        if message.path is not None:
            for older in [each for each in self.waiting if each.path == message.path]:
                older.settled = True
                self.waiting.remove(older)
                self.size -= older.size
        self.waiting.append(message)
        self.size += message.size
        while self.size > MAX_WAITING_BYTES and len(self.waiting) > 1:
            dropped = self.waiting.popleft()
            dropped.settled = True
            self.size -= dropped.size
            self.lost += 1

    def take(self) -> list[_Message]:
        count = min(self.batch, len(self.waiting))
        self.writing = [self.waiting.popleft() for _ in range(count)]
        return self.writing

    def written(self) -> None:
        for message in self.writing:
            message.settled = True
            self.size -= message.size
        self.writing = []


class DiskWriter:
    """Queues file writes. All methods may be called from any thread. Only `settle`, `close`, and
    `replace` in a job thread wait for the disk, for a limited time."""

    def __init__(
        self,
        state: StateDir,
        logs: LogSettings,
        report: Report,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """This object's threads call `report`, which may log the event through this object."""
        self._state, self._report, self._monotonic = state, report, monotonic
        self._changed = threading.Condition()
        self._log = _Lane(lambda: _Log(state, logs, report))
        self._files = _Lane(lambda: _Files(report))
        self._rows = _Lane(lambda: _Rows(state, report), _MAX_BATCH)
        self._lanes = (self._log, self._files, self._rows)
        self._closing = self._started = False

    def start(self) -> None:
        """Start writing, beginning with the messages queued so far."""
        self._started = True
        for lane in self._lanes:
            threading.Thread(target=self._run, args=(lane,), name="disk", daemon=True).start()
        threading.Thread(target=self._watch, name="disk-watch", daemon=True).start()

    # --- requests ---

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record of the event log. This makes the object a log sink."""
        line = render_json(record)
        self._put(self._log, _Message(self._state.log.name, len(line), line=line))

    def replace(self, path: Path, data: bytes | None, mode: int) -> None:
        """Replace an entire file, or remove it if `data` is None. Implements
        `state_dir.FileWriter`.

        In the main thread, which supervises the miner, it never waits. In any other thread it waits
        for the write, and raises TimeoutError after `STUCK_S`. After `close` it does nothing,
        because the process is about to exit.
        """
        if self._closing:
            return
        message = _Message(path.name, len(data or b""), path=path, data=data, mode=mode)
        self._put(self._files, message)
        if threading.current_thread() is threading.main_thread():
            return
        with self._changed:
            if not self._changed.wait_for(lambda: message.settled, STUCK_S):
                raise TimeoutError(errno.ETIMEDOUT, "the disk is not responding", message.file)

    def overwrite(self, path: Path, data: bytes) -> None:
        """Overwrite a file in place. The lock file needs this: a new file would not be locked."""
        self._put(self._files, _Message(path.name, len(data), path=path, data=data))

    def when_it_answers(self, call: Callable[[], None]) -> None:
        """Run `call`, in one of this object's threads, as soon as the disk has completed an
        operation."""
        # Even the lookup of a missing file blocks on a frozen file system.
        path = self._state.root / ".answers"
        self._put(self._files, _Message("the disk", 0, path=path, then=call))

    def row(self, statement: str, values: Sequence[Any]) -> None:
        """Queue a row of run.db."""
        size = len(statement) + sum(len(v) if isinstance(v, str) else 8 for v in values)
        self._put(self._rows, _Message(self._state.db.name, size, row=(statement, values)))

    def _put(self, lane: _Lane, message: _Message) -> None:
        with self._changed:
            lane.add(message)
            self._changed.notify_all()

    def settle(self, within_s: float) -> list[str]:
        """Wait up to `within_s` seconds for all writes. Returns the names of files with unwritten
        data."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left(), within_s)
            return self._left()

    def close(self, within_s: float) -> list[str]:
        """Wait as `settle` does, then close the files. Returns the names of files with unwritten
        data."""
        left_out = self.settle(within_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._started and not left_out:
                self._changed.wait_for(lambda: all(lane.closed for lane in self._lanes), 1.0)
        return left_out

    def _left(self) -> list[str]:
        return sorted(
            {each.file for lane in self._lanes for each in (*lane.writing, *lane.waiting)}
        )

    # --- the threads ---

    def _run(self, lane: _Lane) -> None:
        """Write one lane's messages until the end."""
        writer: _Writer | None = None
        while True:
            retry_s = _RETRY_S if writer is not None and writer.unfinished else None
            with self._changed:
                self._changed.wait_for(lambda: lane.waiting or self._closing, retry_s)
                if self._closing:
                    break
                lane.since = self._monotonic()
                batch = lane.take()
            try:
                writer = lane.make() if writer is None else writer
                for message in batch:
                    writer.write(message)
                if not batch or lane.batch > 1:
                    writer.idle()
            except Exception as error:  # noqa: BLE001 - later messages must still be written; the error is reported
                self._report(degraded(f"cannot write {batch[0].file if batch else ''}: {error!r}"))
            self._finish(lane, batch)
            if batch and lane.batch > 1:
                # Readers need a pause between transactions, and further rows share the next.
                time.sleep(_COMMIT_EVERY_S)
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()
        with self._changed:
            lane.closed = True
            self._changed.notify_all()

    def _finish(self, lane: _Lane, batch: Sequence[_Message]) -> None:
        with self._changed:
            recovered, lost = bool(batch) and (lane.stuck or lane.lost > 0), lane.lost
            lane.written()
            if recovered:
                lane.stuck, lane.lost = False, 0
            self._changed.notify_all()
        for message in batch:
            if message.then is not None:
                message.then()
        if recovered:
            self._report(_recovered(batch[0].file, lost))

    def _watch(self) -> None:
        """Report writes that have been stuck for `STUCK_S`."""
        while not self._closing:
            time.sleep(_LOOK_EVERY_S)
            now = self._monotonic()
            for lane in self._lanes:
                with self._changed:
                    if not lane.writing or lane.stuck or now - lane.since < STUCK_S:
                        continue
                    lane.stuck = True
                    file, seconds = lane.writing[0].file, round(now - lane.since, 1)
                self._report(
                    event(
                        "disk_stuck",
                        "critical",
                        f"DISK STUCK: writes to {file} have been stuck for {seconds:.0f}s; the "
                        "miner keeps running",
                        what=file,
                        seconds=seconds,
                    )
                )


def _recovered(file: str, lost: int) -> Event:
    return event(
        "disk_recovered",
        "info",
        f"DISK RECOVERED: writing {file} again, {counted(lost, 'line')} lost",
        what=file,
        lost=lost,
    )
