"""Lets a test wait for another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(
    condition: Callable[[], Any], seconds: float = 60.0, what: str | Callable[[], str] = ""
) -> Any:
    """Wait until the function returns something true. Raises AssertionError naming what did not
    happen."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, (
            f"not within {seconds} s: {what() if callable(what) else what}"
        )
        time.sleep(0.05)
    return answer
