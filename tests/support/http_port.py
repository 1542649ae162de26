"""Serves the HTTP port alone, with a client for it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from miner_guard.config import GateSettings, HttpSettings
from miner_guard.record.events import Event
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import iso_utc
from tests.support import requires
from tests.support.present_state import write_status


def ask(url: str, token: str | None = None, host: str | None = None) -> tuple[int, str]:
    """Status and body of one request."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(
        url, headers=headers if host is None else {**headers, "Host": host}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Port:
    """Only the port, reading a state directory that the test writes."""

    def __init__(
        self, state: Path, token: str | None = None, *, gate: Any = None, **further: Any
    ) -> None:
        requires.module("uvicorn")
        from miner_guard.show.http import PortThread, Site

        self.state = state
        settings = HttpSettings(**{"port": 0, "token": token, **further})
        self.reports: list[Event] = []
        """Reports of requests that failed."""

        limits = GateSettings(**(gate or {}))
        site = Site(StateDir(state), settings, limits, self.reports.append)
        self._thread = PortThread(site, settings)
        self.number = self._thread.port
        self.url = f"http://127.0.0.1:{self.number}"

    def status(self, age_s: float = 0.0, **fields: Any) -> None:
        started = iso_utc(time.time() - 60)
        document = {"state": "running", "started": started, "run_id": "r1", **fields}
        write_status(self.state, document, age_s=age_s)

    def close(self) -> None:
        self._thread.close()
        self._thread._thread.join(10)
        assert not self._thread.alive
