"""A guard for each test. Each test ends with the look through /proc: nothing of it outlives the
guard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded, guarding


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A guard that is not started yet."""
    with guarding(tmp_path) as guard:
        yield guard
