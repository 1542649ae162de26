"""A guard for each test. Each test ends with the look through /proc: nothing of it outlives the
guard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A guard that is not started yet."""
    guard = Guarded(tmp_path)
    try:
        yield guard
        if all(process.poll() is not None for process in guard.processes):
            guard.assert_nothing_left()
    finally:
        guard.clean()
