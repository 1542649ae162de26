"""Reports each secret that the miner prints, once and without its value. The guard relays the
output unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Launch, Monitor
from miner_guard.record.redaction import SECRET_NAME
from miner_guard.system.once import Once
from miner_guard.uploads.repos.credentials import beside

_COMMITMENT = b"Commitment - ["
_MIN_LENGTH = 12
"""Shorter values of secret variables would match ordinary words."""

_NEXT_STEP = (
    "turn off the miner's debug logging, delete the log files that contain them, and replace the "
    "keys"
)


class SecretLeaksMonitor(Monitor):
    """Searches the miner's output for secrets from the environment and its `.env`, and for subnet
    38's commitment."""

    name = "exposed"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._values = {
            name: value.encode()
            for name, value in beside(os.environ, context.config.repo).items()
            if SECRET_NAME.search(name) and len(value) >= _MIN_LENGTH and not value.startswith("/")
        }
        self._max_length = max([len(_COMMITMENT), *map(len, self._values.values())])
        words = frozenset(map(bytes.lower, [_COMMITMENT, *self._values.values()]))
        # A value of several lines may be split between two blocks.
        self.words = None if any(b"\n" in word for word in words) else words
        self._tail = b""
        self._kinds = Once()

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._tail = b""
        return ()

    def on_output(self, chunk: bytes) -> Iterable[Finding]:
        # Also find values that span two chunks.
        text = self._tail + chunk
        self._tail = text[-(self._max_length - 1) :]
        shown = [f"the value of {name}" for name, value in self._values.items() if value in text]
        if _COMMITMENT in text:
            shown.append("a commitment that contains read credentials")
        return [
            make_finding(
                "secret_exposed", where="the miner's output", kind=kind, next_step=_NEXT_STEP
            )
            for kind in shown
            if self._kinds.first(kind)
        ]

    def snapshot(self) -> Mapping[str, Any]:
        return {"shown": sorted(map(str, self._kinds))}
