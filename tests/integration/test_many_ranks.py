"""64 real gloo ranks on eight nodes agree; the guard costs each a fixed number of descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import many_ranks, requires

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CONNECTIONS = 4
DESCRIPTORS = 10
"""Whatever the number of ranks: two sockets, the record, its two mappings and its copy, the stacks,
the pipe that asks for collectives, the log; one to spare."""


def test_64_ranks_agree_and_the_guard_opens_four_connections_in_each_at_most(
    tmp_path: Path,
) -> None:
    """Guards against an agreement whose connections grow with the ranks: past `ulimit -n` every
    upload would be blocked."""
    requires.module("torch")
    answers = many_ranks.run(tmp_path, 64, 8, "gloo", 500)
    assert len(answers) == 64
    assert len(answers[0].decisions) == many_ranks.QUESTIONS
    for rank, answer in enumerate(answers):
        assert answer.decisions == answers[0].decisions, rank
        assert answer.connections <= CONNECTIONS, (rank, answer.opened)
        assert len(answer.opened) <= DESCRIPTORS, (rank, answer.opened)
