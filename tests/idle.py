"""What surrounds a part whose test is not about it: asking anything of it is the failure."""

from __future__ import annotations

from collections.abc import Callable


class IdleJobs:
    """Schedules nothing."""

    def every(self, name: str, seconds: float, work: Callable[[], None], *, first_after_s: float | None = None) -> None:
        raise AssertionError("not used")

    def once(self, name: str, work: Callable[[], None]) -> None:
        raise AssertionError("not used")


class IdleControl:
    """Steers nothing."""

    def restart(self, cause: str) -> None:
        raise AssertionError("not used")

    def stop(self, cause: str, exit_code: int) -> None:
        raise AssertionError("not used")

    def checkpoint(self) -> None:
        raise AssertionError("not used")
