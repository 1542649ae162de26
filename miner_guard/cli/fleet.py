"""`miner-guard status --host`: the state of guards on other machines, from their HTTP ports."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.cli import screen
from miner_guard.cli.output import echo
from miner_guard.exits import FAILED, NOT_RUNNING, OK, USAGE, Refused
from miner_guard.record.status_document import StatusDocument
from miner_guard.watch.state_words import problem, urgency

DEFAULT_PORT = 9838
_PATIENCE_S, _DEADLINE_S = 5.0, 10.0
_MAX_BYTES = 16 * 1024 * 1024
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@]+)(:\d{1,5})?")
"""A name or an address, IPv6 in brackets, and perhaps a port."""


@dataclass
class RemoteGuard:
    """One guard's port, and what it answered: its state as `/status` shows it, or why not."""

    host: str
    document: dict[str, Any] | None = None
    error: str = f"no answer within {_DEADLINE_S:.0f} s"

    @property
    def status(self) -> StatusDocument:
        return StatusDocument.from_json(self.document)

    @property
    def urgency(self) -> int:
        """A guard that cannot be read needs a person before any other."""
        return -1 if self.document is None else urgency(self.status)

    def ask(self, token: str | None) -> None:
        """Read the guard's state. Never raises."""
        try:
            self.document = _answer(self.host, token)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = str(error) or type(error).__name__


def show(hosts: Sequence[str], token: str | None, *, as_json: bool, check: bool) -> int:
    """Print one line per guard, the worst first; with `check`, only those whose miner makes no
    progress. Returns the exit code: 3 if a guard cannot be read, and with `check` 1 if a miner
    makes no progress. Raises Refused (64) for what is not a host."""
    guards = [RemoteGuard(host.strip()) for text in hosts for host in text.split(",")]
    for guard in guards:
        if not _HOST.fullmatch(guard.host):
            raise Refused(f"--host: {guard.host!r} is not HOST or HOST:PORT", USAGE)
    # Daemons, because a server that sends byte by byte must not delay the exit.
    threads = [threading.Thread(target=g.ask, args=(token,), daemon=True) for g in guards]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    guards.sort(key=lambda guard: (guard.urgency, guard.host))
    unread = any(guard.document is None for guard in guards)
    stuck = [guard for guard in guards if guard.document is None or problem(guard.status)]
    if as_json:
        documents = {guard.host: guard.document or {"error": guard.error} for guard in guards}
        echo(json.dumps(documents, ensure_ascii=False, indent=1))
    else:
        width = max(len(guard.host) for guard in guards)
        for guard in stuck if check else guards:
            words = screen.state_lines(guard.status) if guard.document else ["UNREAD", guard.error]
            echo("  ".join([f"{guard.host:<{width}}", guard.status.name or "", *words]))
    return NOT_RUNNING if unread else FAILED if check and stuck else OK


def _answer(host: str, token: str | None) -> dict[str, Any]:
    """The document at `/status`. Raises OSError, HTTPException, or ValueError for another one.

    Not urllib, which would send the token on to wherever the server redirects.
    """
    place = host if re.search(r":\d+$", host) else f"{host}:{DEFAULT_PORT}"
    connection = http.client.HTTPConnection(place, timeout=_PATIENCE_S)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("GET", "/status", headers=headers)
    response = connection.getresponse()
    if response.status == 401:
        raise ValueError("it requires its token; set MINER_GUARD_HTTP__TOKEN")
    if response.status != 200:
        raise ValueError(f"it answers {response.status} {response.reason}")
    try:
        document = json.loads(response.read(_MAX_BYTES))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "verdict" not in document:
        raise ValueError("it does not answer with a guard's state")
    return document
