"""A monitor's context in a test: jobs that run when the test decides, and stand-ins that fail when
used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miner_guard.config import Config
from miner_guard.record.redaction import Redactor
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from miner_guard.uploads.repos.credentials import beside
from miner_guard.watch.base import Context
from tests.support.ranks import OwnRecords


def context(folder: Path, **given: Any) -> Context:
    """The context for a monitor in a test: `given`, and defaults for the rest; using jobs or
    control fails the test."""
    config: Config = given.get("config", Config())
    defaults: dict[str, Any] = {
        "config": config,
        "state": StateDir(folder),
        "clock": FakeClock(),
        "run_id": "r1",
        "name": "m",
        "write_row": lambda _sql, _values: None,
        "emit": lambda _event: None,
        "jobs": IdleJobs(),
        "control": IdleControl(),
        "status": dict,
        "records": OwnRecords(),
        "redactor": Redactor.for_guard(beside(os.environ, config.repo), config),
    }
    return Context(**{**defaults, **given})


class JobsNever:
    """Accepts work but never runs it."""

    def every(self, name: str, seconds: float, work: Callable[[], None], **_more: Any) -> None:
        """Does not run the work."""

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Does not run it."""


class IdleJobs(JobsNever):
    """Fails the test if a monitor schedules work."""

    def every(self, *_given: Any, **_more: Any) -> None:
        raise AssertionError("not used")

    once = every


class JobsAtOnce(JobsNever):
    """Runs one-time work immediately, in this thread; the test runs repeated work by its name."""

    def __init__(self) -> None:
        self.repeated: dict[str, Callable[[], None]] = {}
        self.every_s: dict[str, float] = {}

    def every(self, name: str, seconds: float, work: Callable[[], None], **_more: Any) -> None:
        self.repeated[name], self.every_s[name] = work, seconds

    def once(self, name: str, work: Callable[[], None]) -> None:
        work()


class JobsLater(JobsAtOnce):
    """Keeps one-time work until the test calls `run`."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []

    def once(self, name: str, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class IdleControl:
    """Fails the test if a monitor controls the supervisor."""

    def finish(self, *_given: Any) -> None:
        raise AssertionError("not used")

    restart = use_command = relaunch = stop = finish


class Steered(IdleControl):
    """Records what a monitor requested, and why."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def restart(self, cause: str) -> None:
        self.asked.append(("restart", cause))

    def finish(self, cause: str) -> None:
        self.asked.append(("finish", cause))
