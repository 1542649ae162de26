"""Generated faults: the miner keeps training through each, or nothing is left in time.

`bar` documents the cases, the checks and how to repeat a seed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.faults.bar import PER_SEED, all_cases, run_seeds
from tests.support import requires

QUICK, AT_ONCE = 12, 4
"""Seeds of every test run, each with `PER_SEED` cases; they run four at once."""

LONG = 120


@pytest.mark.parametrize(
    "first",
    [
        *range(0, QUICK, AT_ONCE),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(QUICK, LONG, AT_ONCE)),
    ],
)
def test_training_survives_generated_faults(first: int, tmp_path: Path) -> None:
    requires.tool("cc")
    namespaces = ["unshare", "-mnupf", "--mount-proc", "true"]
    if subprocess.run(namespaces, capture_output=True).returncode != 0:
        pytest.skip("this user, or a chroot, can't create namespaces")
    failed = run_seeds(range(first, first + AT_ONCE), tmp_path, AT_ONCE)
    assert not failed, "\n".join(failed)


def test_every_run_of_the_tests_has_a_hundred_cases_and_a_long_one_a_thousand() -> None:
    assert QUICK * PER_SEED >= 100
    assert LONG * PER_SEED >= 1000 > 4 * len(all_cases())
