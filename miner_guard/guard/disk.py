"""The guard's side of file writing: queues that never block, and the process that writes their
contents.

The guard's supervision never waits for the state directory's disk. The guard keeps messages that
the process has not confirmed, up to 8 MiB per kind of file; beyond that it drops the oldest and
counts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.config import LogSettings
from miner_guard.eventlog.emitter import render_json
from miner_guard.guard import disk_messages as messages
from miner_guard.guard.disk_messages import FILES, LANES, LOG, RECORDS, ROWS
from miner_guard.record.events import Event, degraded, event
from miner_guard.record.words import counted
from miner_guard.state_dir import PRIVATE_FILE, StateDir
from miner_guard.system.children import Backoff, own_module
from miner_guard.system.readiness import ready

STUCK_S = 5.0
"""The disk counts as unresponsive if no write has been confirmed for this long."""

MAX_WAITING_BYTES = 8 * 1024 * 1024
"""Limit per kind of file. For comparison: an hour of log at one line per second is 1 MiB."""

_IN_FLIGHT = 64
"""How many messages of each kind the guard sends before the process confirms them. The guard can't
drop a message that it has sent."""

_LOOK_EVERY_S = 0.5
_IDLE_LOOK_S = 2.0
"""Interval between checks while no message is in flight: an idle guard should sleep."""

_FILE_OF = {LOG: "guard.jsonl", ROWS: "run.db"}


@dataclass
class _Message:
    data: bytes
    file: str
    path: Path | None = None
    """The file to replace, if the message replaces one; a later message for the same path makes
    this one obsolete."""

    settled: bool = False
    """Whether the message was written, dropped, or made obsolete."""

    held: int | None = None
    """A descriptor that the process opens through /proc; the guard keeps it open until then."""

    then: Callable[[], None] | None = None
    """Called after the write."""

    def settle(self) -> None:
        """Mark the message as settled and release its descriptor."""
        self.settled = True
        if self.held is not None:
            os.close(self.held)
            self.held = None


@dataclass
class _Lane:
    """The queues for one kind of message."""

    waiting: deque[_Message] = field(default_factory=deque)
    sent: deque[_Message] = field(default_factory=deque)
    size: int = 0
    since: float = 0.0
    """Monotonic time at which the oldest message in `sent` became the oldest."""

    lost: int = 0
    stuck: bool = False

    def add(self, message: _Message) -> None:
        if message.path is not None:
            for older in [each for each in self.waiting if each.path == message.path]:
                older.settle()
                self.waiting.remove(older)
                self.size -= len(older.data)
        self.waiting.append(message)
        self.size += len(message.data)
        while self.size > MAX_WAITING_BYTES and len(self.waiting) > 1:
            dropped = self.waiting.popleft()
            dropped.settle()
            self.size -= len(dropped.data)
            self.lost += 1

    def next(self, now: float) -> _Message | None:
        if not self.waiting or len(self.sent) >= _IN_FLIGHT:
            return None
        message = self.waiting.popleft()
        if not self.sent:
            self.since = now
        self.sent.append(message)
        return message

    def done(self, now: float) -> None:
        message = self.sent.popleft()
        message.settle()
        self.size -= len(message.data)
        self.since = now

    def take_back(self) -> None:
        """Put unconfirmed messages back in the queue, because the process that received them has
        exited."""
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()


class DiskWriter:
    """Queues file writes. All methods may be called from any thread. Only `settle`, `close`, and
    `replace` in a job thread wait for the disk, for a limited time."""

    def __init__(
        self,
        state: StateDir,
        logs: LogSettings,
        report: Callable[[Event], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """This object's threads call `report`, which may log the event through this object."""
        self._order: dict[str, Any] = {"state": str(state.root), "logs": dataclasses.asdict(logs)}
        self._report = report
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._lanes = {name: _Lane() for name in LANES}
        self._child: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._backoff = Backoff()
        self._closing = False

    def start(self) -> None:
        """Start writing, beginning with the messages queued so far."""
        threading.Thread(target=self._read_answers, name="disk-answers", daemon=True).start()
        threading.Thread(target=self._send, name="disk-sender", daemon=True).start()

    # --- requests ---

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record of the event log. This makes the object a log sink."""
        self._put(LOG, _Message(messages.log_line(render_json(record)), _FILE_OF[LOG]))

    def replace(self, path: Path, data: bytes | None, mode: int) -> None:
        """Replace an entire file, or remove it if `data` is None. Implements
        `state_dir.FileWriter`.

        In the main thread, which supervises the miner, it never waits. In any other thread it waits
        for the write, and raises TimeoutError after `STUCK_S`. After `close` it does nothing,
        because the process is about to exit.
        """
        if self._closing:
            return
        message = _Message(messages.file(path, data, mode), path.name, path)
        self._put(FILES, message)
        if threading.current_thread() is not threading.main_thread():
            self._wait_for(message)

    def overwrite(self, path: Path, data: bytes) -> None:
        """Overwrite a file in place. The lock file needs this: a new file would not be locked."""
        self._put(FILES, _Message(messages.file(path, data, None), path.name, path))

    def copy_record(self, path: Path, memory: int) -> None:
        """Update the copy at `path` of the flight record open as descriptor `memory`. Raises
        OSError if no descriptor is free."""
        held = os.dup(memory)
        data = messages.record(path, f"/proc/{os.getpid()}/fd/{held}")
        self._put(RECORDS, _Message(data, path.name, path, held=held))

    def when_it_answers(self, call: Callable[[], None]) -> None:
        """Run `call`, in one of this object's threads, as soon as the disk has completed an
        operation."""
        # Even the lookup of a missing file blocks on a frozen file system.
        path = Path(self._order["state"]) / ".answers"
        self._put(FILES, _Message(messages.file(path, None, PRIVATE_FILE), "the disk", then=call))

    def _wait_for(self, message: _Message) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: message.settled, STUCK_S):
                raise TimeoutError(errno.ETIMEDOUT, "the disk is not responding", message.file)

    def row(self, statement: str, values: Sequence[Any]) -> None:
        """Queue a row of run.db."""
        self._put(ROWS, _Message(messages.row(statement, values), _FILE_OF[ROWS]))

    def _put(self, lane: str, message: _Message) -> None:
        with self._changed:
            self._lanes[lane].add(message)
            self._changed.notify_all()

    def settle(self, within_s: float) -> list[str]:
        """Wait up to `within_s` seconds for all writes. Returns the names of files with unwritten
        data."""
        deadline = self._monotonic() + within_s
        with self._changed:
            while self._left() and (left := deadline - self._monotonic()) > 0:
                self._changed.wait(left)
            return self._left()

    def close(self, within_s: float) -> list[str]:
        """Wait as `settle` does, then end the process. Returns the names of files with unwritten
        data."""
        left_out = self.settle(within_s)
        with self._changed:
            self._closing = True
            child, self._child = self._child, None
            self._changed.notify_all()
        if child is not None:
            _end(child, wait=not left_out)
        return left_out

    def _left(self) -> list[str]:
        lanes = self._lanes.values()
        return sorted({each.file for lane in lanes for each in (*lane.sent, *lane.waiting)})

    # --- the process ---

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (self._child is None or (data := self._next()) is None):
                    self._changed.wait()
                child = self._child
                if child is None or self._closing:
                    return
            assert child.stdin is not None
            # If the process has exited, `_read_answers` notices it by EOF and queues unconfirmed
            # messages again.
            with contextlib.suppress(OSError, ValueError):
                while data:
                    data = data[os.write(child.stdin.fileno(), data) :]

    def _next(self) -> bytes | None:
        now = self._monotonic()
        found = (lane.next(now) for lane in self._lanes.values())
        return next((message.data for message in found if message is not None), None)

    def _read_answers(self) -> None:
        rest = b""
        while not self._closing:
            child = self._child
            if child is None:
                rest = b""
                self._start_child()
                continue
            assert child.stdout is not None
            in_flight = any(lane.sent for lane in self._lanes.values())
            wait_s = _LOOK_EVERY_S if in_flight else _IDLE_LOOK_S
            readable, _ = ready([child.stdout], wait_s)
            if readable:
                data = os.read(child.stdout.fileno(), 65536)
                if not data:
                    self._ended(child)
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._understand(json.loads(line))
            self._look_for_stuck()

    def _start_child(self) -> None:
        wait_s = self._start_at - self._monotonic()
        if wait_s > 0:
            time.sleep(min(wait_s, _LOOK_EVERY_S))
            return
        try:
            child = subprocess.Popen(
                own_module("miner_guard.guard.disk_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                cwd="/",
                env=dict(os.environ),
            )
        except OSError as error:
            self._wait_again(0.0, f"could not be started ({error.strerror})")
            return
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.write(json.dumps(self._order).encode() + b"\n")
        with self._changed:
            self._child, self._started_at = child, self._monotonic()
            self._changed.notify_all()

    def _ended(self, child: subprocess.Popen[bytes]) -> None:
        with self._changed:
            if self._child is not child:
                return
            self._child = None
            for lane in self._lanes.values():
                lane.take_back()
        _end(child, wait=True)
        self._wait_again(self._monotonic() - self._started_at, f"exited (code {child.returncode})")

    def _wait_again(self, lived_s: float, how: str) -> None:
        wait_s = self._backoff.ended(lived_s)
        self._start_at = self._monotonic() + wait_s
        if self._backoff.first:
            what = f"the process that writes the guard's files {how}; restarting it in {wait_s:g} s"
            self._report(degraded(what))

    def _understand(self, document: Mapping[str, Any]) -> None:
        if "done" in document:
            self._confirmed(document["done"])
        elif (event := Event.from_json(document.get("say") or {})) is not None:
            self._report(event)

    def _confirmed(self, name: str) -> None:
        lane = self._lanes[name]
        with self._changed:
            if not lane.sent:
                return
            message = lane.sent[0]
            lane.done(self._monotonic())
            recovered, lost = lane.stuck or lane.lost > 0, lane.lost
            lane.stuck, lane.lost = False, 0
            self._changed.notify_all()
        if message.then is not None:
            message.then()
        if recovered:
            self._report(
                event(
                    "disk_recovered",
                    "info",
                    f"DISK RECOVERED: writing {message.file} again, {counted(lost, 'line')} lost",
                    what=message.file,
                    lost=lost,
                )
            )

    def _look_for_stuck(self) -> None:
        now = self._monotonic()
        for lane in self._lanes.values():
            with self._changed:
                if not lane.sent or lane.stuck or now - lane.since < STUCK_S:
                    continue
                lane.stuck = True
                file, seconds = lane.sent[0].file, now - lane.since
            self._report(
                event(
                    "disk_stuck",
                    "critical",
                    f"DISK STUCK: writes to {file} have been stuck for "
                    f"{round(seconds, 1):.0f}s; the miner keeps running",
                    what=file,
                    seconds=round(seconds, 1),
                )
            )


def _end(child: subprocess.Popen[bytes], *, wait: bool) -> None:
    """Close the child's standard input, which makes it exit unless the disk blocks it. `wait`: give
    it a second for that. A child that is still running gets SIGKILL."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    if wait:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
    if child.poll() is None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.2)
