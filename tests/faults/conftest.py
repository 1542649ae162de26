"""Provides a guard for each test. Each test ends with a search through /proc for processes that
outlived the guard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.guarded import Guarded, guarding


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A guard that has not been started yet."""
    with guarding(tmp_path) as guard:
        yield guard
