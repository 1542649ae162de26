"""A monitor's context in a test: jobs that run when the test decides, and stand-ins that fail when
used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miner_guard.config import Config
from miner_guard.eventlog.redact import Redactor
from miner_guard.monitors.base import Context
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from uploads.repos.credentials import beside


def context(folder: Path, **given: Any) -> Context:
    """For a part in a test: as `given`, else quiet and at its default; jobs and control must not be
    asked for."""
    config: Config = given.get("config", Config())
    defaults: dict[str, Any] = {
        "config": config,
        "state": StateDir(folder),
        "clock": FakeClock(),
        "run_id": "r1",
        "emit": lambda _finding: None,
        "jobs": IdleJobs(),
        "control": IdleControl(),
        "status": dict,
        "redactor": Redactor.for_guard(beside(os.environ, config.repo), config),
    }
    return Context(**{**defaults, **given})


class JobsNever:
    """Takes work and does none."""

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        """Not done."""

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Not done."""


class IdleJobs(JobsNever):
    """Asking it for work is the failure."""

    def every(self, name: str, *_given: Any, **_more: Any) -> None:
        raise AssertionError("not used")

    def once(self, name: str, work: Callable[[], None]) -> None:
        raise AssertionError("not used")


class JobsAtOnce(JobsNever):
    """One-time work is done at once, in this thread; repeated work waits for the test to call it by
    name."""

    def __init__(self) -> None:
        self.repeated: dict[str, Callable[[], None]] = {}
        self.every_s: dict[str, float] = {}

    def every(
        self,
        name: str,
        seconds: float,
        work: Callable[[], None],
        *,
        first_after_s: float | None = None,
    ) -> None:
        self.repeated[name], self.every_s[name] = work, seconds

    def once(self, name: str, work: Callable[[], None]) -> None:
        work()


class JobsLater(JobsAtOnce):
    """One-time work waits too."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []

    def once(self, name: str, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class IdleControl:
    """Asking it to steer is the failure."""

    def finish(self, cause: str) -> None:
        raise AssertionError("not used")

    def restart(self, cause: str) -> None:
        raise AssertionError("not used")

    def use_command(self, command: Sequence[str]) -> None:
        raise AssertionError("not used")

    def relaunch(self, cause: str) -> None:
        raise AssertionError("not used")

    def stop(self, cause: str, exit_code: int) -> None:
        raise AssertionError("not used")


class Steered(IdleControl):
    """Keeps what a monitor asked for, and why."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def restart(self, cause: str) -> None:
        self.asked.append(("restart", cause))

    def finish(self, cause: str) -> None:
        self.asked.append(("finish", cause))
