"""`python -m miner_guard.guard.disk_process`: the process that writes the guard's files.

It is a separate process because a thread that is stuck in the kernel on a dead disk (D state) keeps
its whole process from exiting, even after SIGKILL. In the guard, such a thread would block
everything that waits for the guard to exit. This process exits at EOF on its standard input."""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miner_guard.eventlog.jsonl import JsonlSink, Rotation
from miner_guard.eventlog.write_errors import write_failed
from miner_guard.guard.disk_messages import FILES, LOG, RECORDS, ROWS, line_of
from miner_guard.rank import layout
from miner_guard.rank.flight import copy
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.store import RunStore
from miner_guard.record.words import counted
from miner_guard.state_dir import StateDir, replace_file
from miner_guard.system import children

_RETRY_S = 1.0
_MAX_BATCH = 64
_COMMIT_EVERY_S = 0.05

Report = Callable[[Event], None]
Message = dict[str, Any]


class Log:
    """Writes guard.jsonl."""

    def __init__(self, state: StateDir, settings: Rotation, report: Report) -> None:
        self._sink = JsonlSink(state.log, settings, report)

    def write(self, message: Message) -> None:
        """Append the message's line."""
        self._sink.append(message["line"])

    def unfinished(self) -> bool:
        """Always False: a line that can't be written is dropped and counted, not retried."""
        return False

    def idle(self) -> None:
        """Do nothing: no writes are queued."""

    def close(self) -> None:
        """Close the file after the last line."""
        self._sink.close()


class Files:
    """Replaces, overwrites or removes whole files. Retries a failed write until it succeeds or a
    newer message for the same file makes it obsolete."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._waiting: dict[Path, Message] = {}
        self._outdated = 0
        self._named = ""
        """The file that the outage report names; the recovery report names the same one."""

    def write(self, message: Message) -> None:
        """Replace, overwrite or remove the file."""
        path = Path(message["path"])
        self._outdated += self._waiting.pop(path, None) is not None
        first = not self._waiting
        try:
            _do(path, message)
        except OSError as error:
            self._waiting[path] = message
            if first:
                self._named = path.name
                self._report(write_failed(path.name, error))

    def unfinished(self) -> bool:
        """Return True while a failed write still has to be retried."""
        return bool(self._waiting)

    def idle(self) -> None:
        """Retry failed writes."""
        for path, message in list(self._waiting.items()):
            with contextlib.suppress(OSError):
                _do(path, message)
                del self._waiting[path]
                if not self._waiting:
                    lost, self._outdated = self._outdated, 0
                    self._report(
                        event(
                            "disk_recovered",
                            "info",
                            f"DISK RECOVERED: writing {self._named} again, "
                            f"{counted(lost, 'line')} lost",
                            what=self._named,
                            lost=lost,
                        )
                    )

    def close(self) -> None:
        """Retry failed writes one last time."""
        self.idle()


def _do(path: Path, message: Message) -> None:
    data = None if message["data"] is None else base64.b64decode(message["data"])
    if data is None or message["mode"] is not None:
        replace_file(path, data, message["mode"])
        return
    _overwrite(path, data)


def _overwrite(path: Path, data: bytes) -> None:
    """Overwrite a file in place. Raises OSError."""

    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


class Records:
    """Writes the copies of the ranks' flight records."""

    def __init__(self) -> None:
        self._records: dict[Path, tuple[int, mmap.mmap]] = {}

    def write(self, message: Message) -> None:
        """Copy new data. Errors are not reported: the next message retries the copy, and a full
        disk is reported when a write to another file fails."""
        path = Path(message["path"])
        with contextlib.suppress(OSError):
            fd = os.open(message["memory"], os.O_RDONLY | os.O_CLOEXEC)
            try:
                copy(path, self._record(path, fd))
            finally:
                os.close(fd)

    def _record(self, path: Path, fd: int) -> mmap.mmap:
        inode = os.fstat(fd).st_ino
        mapped = self._records.get(path)
        if mapped is not None and mapped[0] == inode:
            return mapped[1]
        record = mmap.mmap(fd, layout.FILE_SIZE, access=mmap.ACCESS_READ)
        self._records[path] = (inode, record)
        return record

    def unfinished(self) -> bool:
        """Always False: if a copy fails, the next message retries it."""
        return False

    def idle(self) -> None:
        """Do nothing: no writes are queued."""

    def close(self) -> None:
        """Copy the final state, because the guard may have died before requesting it."""
        for path, (_, record) in self._records.items():
            with contextlib.suppress(OSError):
                copy(path, record)


class Rows:
    """Writes run.db."""

    def __init__(self, state: StateDir, report: Report) -> None:
        self._store = RunStore(state.db, report)

    def write(self, message: Message) -> None:
        """Queue the row for the transaction that `idle` commits."""
        self._store.queue((message["statement"], message["values"]))

    def unfinished(self) -> bool:
        """Return True while rows are queued."""
        return self._store.waiting > 0

    def idle(self) -> None:
        """Write the queued rows in one transaction."""
        self._store.retry()

    def close(self) -> None:
        """Retry queued rows, then close the file."""
        self._store.close()


class Lane(threading.Thread):
    """Thread that writes the messages of one kind, in order."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Log | Files | Rows | Records],
        report: Report,
        answer: Callable[[Message], None],
    ) -> None:
        super().__init__(name=name)
        self._make, self._report, self._answer = make, report, answer
        self.messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Write messages until None arrives."""
        writer: Log | Files | Rows | Records | None = None
        while True:
            unfinished = writer is not None and writer.unfinished()
            try:
                message = self.messages.get(timeout=_RETRY_S if unfinished else None)
            except queue.Empty:
                assert writer is not None
                writer.idle()
                continue
            if message is None:
                break
            batch = [message]
            # Rows share a transaction, because a commit waits for the disk.
            while self.name == ROWS and len(batch) < _MAX_BATCH and not self.messages.empty():
                if (message := self.messages.get()) is None:
                    break
                batch.append(message)
            try:
                writer = self._make() if writer is None else writer
                for each in batch:
                    writer.write(each)
                if self.name == ROWS:
                    writer.idle()
                    # Readers need a pause between transactions, and further rows share the next.
                    time.sleep(_COMMIT_EVERY_S)
            except Exception as error:  # noqa: BLE001 - later messages must still be written; the error is reported
                self._report(degraded(f"cannot write {self.name}: {error!r}"))
            for _ in batch:
                self._answer({"done": self.name})
            if message is None:
                break
        if writer is not None:
            writer.close()


def main() -> None:
    """Read messages until the guard closes the pipe, then flush and exit."""
    children.continue_when_the_parent_dies()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A service manager such as systemd signals the whole group; this process must still write
        # the guard's last lines.
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.stdin.buffer.readline())
    state, settings = StateDir(Path(order["state"])), SimpleNamespace(**order["logs"])
    out, mutex = os.dup(1), threading.Lock()
    # Send stray prints to stderr, because the guard parses stdout as answers.
    os.dup2(2, 1)

    def answer(document: Message) -> None:
        data = line_of(document)
        with mutex:
            while data:
                data = data[os.write(out, data) :]

    def report(event: Event) -> None:
        answer({"say": event.to_json()})

    lanes = {
        LOG: Lane(LOG, lambda: Log(state, settings, report), report, answer),
        FILES: Lane(FILES, lambda: Files(report), report, answer),
        ROWS: Lane(ROWS, lambda: Rows(state, report), report, answer),
        RECORDS: Lane(RECORDS, Records, report, answer),
    }
    for lane in lanes.values():
        lane.start()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        lanes[message["lane"]].messages.put(message)
    for lane in lanes.values():
        lane.messages.put(None)
    for lane in lanes.values():
        lane.join()


if __name__ == "__main__":
    main()
