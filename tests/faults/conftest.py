"""A guard for each test; nothing of it outlives the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A guard that is not started yet."""
    guard = Guarded(tmp_path)
    yield guard
    guard.clean()
