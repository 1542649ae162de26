"""Writes the guard's files in a thread, so that the guard never waits for the disk.

Lines and rows in 8 MiB of memory wait for a disk that is full or does not respond; beyond that the
oldest are dropped and counted. A thread that is stuck in the kernel on a dead disk (D state) keeps
the guard's process from exiting, but not the keeper, which owns the miner and waits a few seconds
only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.config import LogSettings
from miner_guard.record.emitter import JsonlFile
from miner_guard.record.events import Event, WriteOutage, degraded, event
from miner_guard.record.lines import json_line
from miner_guard.record.store import RunStore, section_of
from miner_guard.record.words import counted
from miner_guard.state_dir import StateDir, replace_file

STUCK_S = 5.0
"""The disk counts as unresponsive if a write has taken this long."""

MAX_WAITING_BYTES = 8 * 1024 * 1024
"""Of this process's memory. For comparison: an hour of events, one per second, takes 5 MiB."""

_ITEM_BYTES = 150
"""Of a queue for one line or row, without its text: tuples and a size."""

_RETRY_S = 1.0
_COMMIT_EVERY_S = 0.05
"""Pause after each pass: readers of run.db need one between transactions, and further rows share
the next transaction."""

_Row = tuple[str, Sequence[Any]]
_Item = TypeVar("_Item")
_Queue = deque[tuple[_Item, int]]
"""Lines of guard.jsonl or rows of run.db, with their sizes."""


class DiskWriter:
    """Queues file writes. All methods may be called from any thread. Only `settle` and `close` wait
    for the disk, for a limited time."""

    def __init__(
        self,
        state: StateDir,
        logs: LogSettings,
        report: Callable[[Event], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """This object's thread calls `report`, which may log the event through this object."""
        self._state, self._report, self._monotonic = state, report, monotonic
        self._changed = threading.Condition()
        self._lines: _Queue[str] = deque()
        self._rows: _Queue[_Row] = deque()
        self._size = 0
        self._lost = Counter[str]()
        """By file: lines or rows that were dropped for want of memory, until that is reported."""

        self._files: dict[Path, tuple[bytes | None, int]] = {}
        """New content, None to remove the file, and mode."""

        self._taken: set[Path] = set()
        """Files that the thread is about to write."""

        self._log = JsonlFile(state.log, logs)
        self._store = RunStore(state.db, report)
        self._outages: dict[str, WriteOutage] = {}
        self._writing, self._since = "", 0.0
        """The file that is being written, and since when."""

        self._stuck = self._closing = self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start writing, beginning with what has been queued so far."""
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Report a write that has been stuck for `STUCK_S`, and restart a dead thread. Call this
        about once a second."""
        if self._thread is not None and not self._thread.is_alive() and not self._closing:
            self._report(degraded("the thread that writes the guard's files died; restarted"))
            self.start()
        file, seconds = self._writing, self._monotonic() - self._since
        if file and seconds >= STUCK_S and not self._stuck:
            self._stuck = True
            what = f"writes to {file} have been stuck for {seconds:.0f}s; the miner keeps running"
            facts: dict[str, Any] = {"what": file, "seconds": round(seconds, 1)}
            self._report(event("disk_stuck", "critical", f"DISK STUCK: {what}", **facts))

    # --- requests ---

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record of the event log. This makes the object a log sink."""
        if record.get("file") == self._state.log.name:
            # The log's own trouble: the console, run.db and the monitors hear of it.
            return
        line = json_line(record)
        self._put(self._lines, line, sys.getsizeof(line), self._state.log)

    def row(self, statement: str, values: Sequence[Any]) -> None:
        """Queue a row of run.db."""
        size = sys.getsizeof(values) + sum(map(sys.getsizeof, values))
        self._put(self._rows, (statement, values), size, self._state.db)

    def _put(self, queue: _Queue[_Item], item: _Item, size: int, file: Path) -> None:
        size += _ITEM_BYTES
        with self._changed:
            queue.append((item, size))
            self._size += size
            while self._size > MAX_WAITING_BYTES and len(queue) > 1:
                self._size -= queue.popleft()[1]
                self._lost[file.name] += 1
            self._changed.notify_all()

    def replace(self, path: Path, data: bytes | None, mode: int) -> None:
        """Replace an entire file, or remove it if `data` is None. Implements
        `state_dir.FileWriter`.

        In the main thread, which supervises the miner, it never waits. In any other thread it waits
        for the write, and raises TimeoutError if the disk takes none for `STUCK_S`; the write stays
        queued. After `close` it does nothing, because the process is about to exit.
        """
        if self._closing:
            return
        with self._changed:
            self._files[path] = data, mode
            self._changed.notify_all()
            if threading.current_thread() is threading.main_thread():
                return
            self._changed.wait_for(lambda: self._settled(path), STUCK_S)
            if path in self._files or path in self._taken:
                raise TimeoutError(errno.ETIMEDOUT, "the disk takes no writes", path.name)

    def _settled(self, path: Path) -> bool:
        queued = path in self._files or path in self._taken
        return not queued or path.name in self._outages

    @property
    def idle(self) -> bool:
        """Whether everything that was queued is written."""
        with self._changed:
            return not self._unwritten()

    def settle(self, within_s: float) -> list[str]:
        """Wait up to `within_s` seconds for all writes. Returns the names of files with unwritten
        data."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten(), within_s)
            return self._unwritten()

    def close(self, within_s: float) -> list[str]:
        """Wait as `settle` does, then close the files. Returns the names of files with unwritten
        data."""
        unwritten = self.settle(within_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._thread is not None and not unwritten:
                self._changed.wait_for(lambda: self._closed, 1.0)
        return unwritten

    def _unwritten(self) -> list[str]:
        names = {self._writing, *(path.name for path in self._files)}
        names |= {self._state.log.name} if self._lines else set()
        names |= {self._state.db.name} if self._rows else set()
        return sorted(names - {""})

    # --- the thread ---

    def _run(self) -> None:
        while not self._closing:
            with self._changed:
                if self._outages:
                    self._changed.wait_for(lambda: self._closing, _RETRY_S)
                else:
                    self._changed.wait_for(self._due)
                files, self._files = self._files, {}
                self._taken = set(files)
            try:
                self._pass(files)
            except Exception as error:  # noqa: BLE001 - later data must still be written; the error is reported
                self._report(degraded(f"cannot write {self._writing}: {error!r}"))
            self._begin("")
            if not self._outages:
                self._report_recovery()
            time.sleep(_COMMIT_EVERY_S)
        with contextlib.suppress(Exception):
            self._log.close()
            self._store.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _due(self) -> bool:
        return bool(self._lines or self._rows or self._files or self._closing)

    def _begin(self, file: str) -> None:
        with self._changed:
            self._writing, self._since = file, self._monotonic()
            self._changed.notify_all()

    def _pass(self, files: Mapping[Path, tuple[bytes | None, int]]) -> None:
        self._write_rows()
        while self._lines and self._write_line():
            pass
        for path, (data, mode) in files.items():
            written = self._attempt(path.name, functools.partial(replace_file, path, data, mode))
            with self._changed:
                if not written:
                    self._files.setdefault(path, (data, mode))
                self._taken.discard(path)
                self._changed.notify_all()

    def _write_rows(self) -> None:
        file = self._state.db.name
        self._begin(file)
        with self._changed:
            batch = list(self._rows)
            self._rows.clear()
            self._size -= sum(size for _, size in batch)
        rows = [row for row, _ in batch]
        if not batch or self._attempt(file, lambda: self._store.write(*rows)):
            return
        # Of the present state, only the latest is worth keeping.
        latest = {section_of(row): place for place, row in enumerate(rows)}
        remaining = [
            item
            for place, item in enumerate(batch)
            if (section := section_of(item[0])) is None or latest[section] == place
        ]
        with self._changed:
            self._rows.extendleft(reversed(remaining))
            self._size += sum(size for _, size in remaining)

    def _write_line(self) -> bool:
        with self._changed:
            line, size = self._lines.popleft()
        written = self._attempt(self._state.log.name, lambda: self._log.append(line))
        with self._changed:
            if written:
                self._size -= size
            else:
                self._lines.appendleft((line, size))
        return written

    def _attempt(self, file: str, work: Callable[[], None]) -> bool:
        """Write one file. Returns whether that succeeded; reports when that changes."""
        self._begin(file)
        outage = self._outages.pop(file, None) or WriteOutage(file)
        try:
            work()
            with self._changed:
                trouble = outage.succeeded(self._lost[file])
                if trouble is not None:
                    del self._lost[file]
        except OSError as error:
            trouble = outage.failed(error)
            self._outages[file] = outage
        if trouble is not None:
            self._report(trouble)
        return file not in self._outages

    def _report_recovery(self) -> None:
        with self._changed:
            lost = sum(self._lost.values())
            self._lost.clear()
            stuck, self._stuck = self._stuck, False
        if stuck or lost:
            file = self._state.log.name
            text = f"DISK RECOVERED: writing {file} again, {counted(lost, 'line')} lost"
            self._report(event("disk_stuck", "info", text, what=file, lost=lost))
