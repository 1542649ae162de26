"""Prints a rank's events while no guard is there to log them. Never waits: what the console does
not take at once is dropped, counted, and the count is printed."""

from __future__ import annotations

import os
import select
import time

from miner_guard.record.events import Event, degraded
from miner_guard.record.lines import console_line
from miner_guard.record.redaction import Redactor
from miner_guard.record.words import counted
from miner_guard.system.clock import iso_utc

_ATOMIC = select.PIPE_BUF
"""A pipe that is ready takes this many bytes without waiting."""


class Console:
    def __init__(self, rank: int, descriptor: int | None) -> None:
        """`descriptor`: where to print, or None."""
        self._rank = rank
        self._descriptor = descriptor
        self._redactor = Redactor.from_environment(os.environ)
        self._dropped = 0

    def say(self, event: Event) -> None:
        """Print one event. Never waits, never raises."""
        if self._descriptor is None:
            return
        dropped, self._dropped = self._dropped, 0
        if dropped and not self._print(
            degraded(f"could not print {counted(dropped, 'line')} of this rank: the pipe was full")
        ):
            self._dropped = dropped
        self._dropped += not self._print(event)

    def _print(self, event: Event) -> bool:
        try:
            record = {
                "ts": iso_utc(time.time()),
                "level": event.level,
                "event": event.name,
                "msg": event.text,
                "rank": self._rank if event.rank is None else event.rank,
            }
            line = console_line(self._redactor.value(record), emoji=True)
            data = f"{line}\n".encode("utf-8", "replace")
            for start in range(0, len(data), _ATOMIC):
                if self._descriptor is None or not _ready(self._descriptor):
                    return False
                os.write(self._descriptor, data[start : start + _ATOMIC])
        except OSError:
            # Nobody reads the console anymore, and there is nowhere else to report that.
            self._descriptor = None
        except Exception as error:  # noqa: BLE001 - one event must not silence the others; the rank continues
            return event.name == "guard_degraded" or self._print(
                degraded(f"could not print {event.name}: {type(error).__name__}"[:200])
            )
        return True


def _ready(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(state & select.POLLOUT for _, state in poll.poll(0))
