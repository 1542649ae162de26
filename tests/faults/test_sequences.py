"""Random sequences of faults: the miner keeps stepping through each, and the run leaves nothing
behind.

`sequences` documents the faults, the checks and how to repeat a seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.sequences import Sequence, clock_library

QUICK = (8, 11)
"""Seeds to use in every test run. Add each seed that fails."""

SEEDS = 500


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    return clock_library(tmp_path_factory.mktemp("clock"))


@pytest.mark.parametrize(
    "seed",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.long) for n in range(SEEDS) if n not in QUICK)],
)
def test_a_random_sequence_of_faults(seed: int, tmp_path: Path, library: Path | None) -> None:
    Sequence(seed, tmp_path, library).run()
