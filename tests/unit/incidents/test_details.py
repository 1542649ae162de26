"""Fixes quote details from the line: the package, path, host or repo that it names, never a
placeholder."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.incidents import explain

ROWS = Path(__file__).with_name("details.tsv").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize("row", ROWS)
def test_a_line_names_its_detail(row: str) -> None:
    detail, named, line = row.split("\t")
    assert explain.named(detail, [line]) == named


def test_a_placeholder_is_filled_from_the_first_line_that_names_it_or_by_its_default() -> None:
    text = "Free {path|the disk}, then look at {host|the host}."
    lines = ["nothing here", "No space left on device: '/scratch/a'"]
    assert explain.filled(text, lines) == "Free /scratch/a, then look at the host."
