"""Runs only the HTTP port's process, with a client for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from miner_guard.system.clock import iso_utc
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
    """Only the port's process, reading a state directory that the test writes."""

    def __init__(self, state: Path, token: str | None = None, **further: Any) -> None:
        self.state = state
        order = {"state": str(state), "host": "127.0.0.1", "port": 0, "token": token, **further}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "miner_guard.show.http"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(order).encode() + b"\n")
        self.child.stdin.flush()
        self.number = int(self.child.stdout.readline())
        self.url = f"http://127.0.0.1:{self.number}"

    def status(self, age_s: float = 0.0, **fields: Any) -> None:
        started = iso_utc(time.time() - 60)
        document = {"state": "running", "started": started, "run_id": "r1", **fields}
        write_status(self.state, document, age_s=age_s)

    def close(self) -> int:
        assert self.child.stdin is not None
        self.child.stdin.close()
        return self.child.wait(timeout=10)
