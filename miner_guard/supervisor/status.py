"""status.json: what the running guard knows, replaced atomically about once a second when it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miner_guard.clock import Clock, iso_utc
from miner_guard.events import Finding, found, unwritten
from miner_guard.statedir import StateDir, finite, write_json


class Status:
    """Keeps the latest document and writes it. Reading `latest` is safe from any thread."""

    def __init__(self, state: StateDir, clock: Clock, report: Callable[[Finding], None]) -> None:
        self._state = state
        self._clock = clock
        self._report = report
        self._written: Any = None
        self._failing = 0
        self.latest: Mapping[str, Any] = {}

    def update(self, document: Mapping[str, Any]) -> None:
        """Take a new document; write it where it says something new."""
        plain = finite(document)
        self.latest = {**plain, "updated": iso_utc(self._clock.wall())}
        if plain == self._written:
            return
        try:
            write_json(self._state.status, self.latest)
        except OSError as error:
            if not self._failing:
                self._report(unwritten("status.json", error))
            self._failing += 1
            return
        self._written = plain
        if self._failing:
            lost, self._failing = self._failing, 0
            self._report(found("disk_recovered", what="status.json", lost=lost))
