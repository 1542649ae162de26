"""Interprets an OTLP receiver's responses: their status, the reason for a failure, and when to
retry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import requests

from miner_guard.system.backoff import Backoff

WRONG_REQUEST = frozenset(range(400, 500)) - {401, 403, 404, 408, 429}
"""Status codes that mean the receiver would refuse the same request again. The excluded 4xx codes
are retried: an operator can correct the setting, or the receiver asks the sender to wait."""


class LatestAnswer:
    """Remembers the status of the latest response, which the SDK's exporters do not return."""

    def __init__(self) -> None:
        self.status: int | None = None
        """The latest HTTP status; None if the receiver did not respond."""

        self.session = requests.Session()
        self.session.hooks["response"].append(self._remember)

    def forget(self) -> None:
        """Forget the last status. Call this before each request, because a request without a
        response leaves the status unchanged."""
        self.status = None

    def _remember(self, answer: requests.Response, **_options: Any) -> None:
        self.status = answer.status_code


class LastWords(logging.Handler):
    """Keeps the SDK's latest log message, which gives the reason for a failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

    def of_failure(self, export: Callable[[], object]) -> object:
        """Run an export and return its result; None if it raises, as older versions of the SDK do
        when nothing listens at the endpoint."""
        try:
            return export()
        except requests.RequestException as error:
            self.text = str(error)
            return None


class Channel:
    """Tracks how the receiver responds to one signal: when to retry, and what to report."""

    def __init__(self, signal: str, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._signal, self._report = signal, report
        self._backoff = Backoff()
        self._failing_since: float | None = None
        self._again_at = 0.0

    def ready(self, now: float) -> bool:
        """Return whether the pause after the latest failure is over."""
        return now >= self._again_at

    def succeeded(self, now: float) -> None:
        """Record that the receiver accepted a request."""
        if self._failing_since is not None:
            seconds = round(now - self._failing_since, 1)
            self._report({"recovered": self._signal, "seconds": seconds})
            self._failing_since, self._backoff, self._again_at = None, Backoff(), 0.0

    def failed(self, now: float, reason: str) -> None:
        """Record that the receiver did not accept a request. Only the first of consecutive
        failures is reported."""
        self._again_at = now + self._backoff.ended(0.0)
        if self._failing_since is None:
            self._failing_since = now
            self._report({"failing": self._signal, "reason": reason})
