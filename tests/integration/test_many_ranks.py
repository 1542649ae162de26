"""64 real gloo ranks on eight nodes agree, and the guard keeps at most four descriptors open in
each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import many_ranks, requires

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

DESCRIPTORS = 4
"""Descriptors per rank, whatever the number of ranks: the flight record's memory, the file of
stacks, the socket to the supervisor, the socket to the ranks of the node."""


def test_64_ranks_agree_and_the_guard_holds_four_descriptors_in_each_at_most(
    tmp_path: Path,
) -> None:
    """If the agreement's connections grew with the ranks, every upload would be blocked beyond
    `ulimit -n`."""
    requires.module("torch")
    answers = many_ranks.run(tmp_path, 64, 8, "gloo", 500)
    assert len(answers) == 64
    assert len(answers[0].decisions) == many_ranks.QUESTIONS
    for rank, answer in enumerate(answers):
        assert answer.decisions == answers[0].decisions, rank
        assert "the agreement" in answer.opened
        assert answer.descriptors <= DESCRIPTORS, (rank, answer.opened)
