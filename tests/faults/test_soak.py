"""An hour of faults: the guard's memory, descriptors and threads stay flat, and it exits
cleanly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import grown, soak


@pytest.mark.long
def test_an_hour_of_faults_leaves_nothing_behind(tmp_path: Path) -> None:
    assert grown(soak(60.0, 1, tmp_path)) == []
