"""Ranks that exit while others train: which rank left, how, and when that is worth a line."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from miner_guard.guard.restart import ran_to_its_end
from miner_guard.rank.layout import Now
from miner_guard.watch.ranks import ended_early, left_behind


def rank(state: str, heartbeat: float = 100.0, steps: int = 15) -> Now:
    return Now(state, "", heartbeat, heartbeat, None, steps, steps, None, None, None, None, steps)


def test_a_rank_that_ended_early_is_named_with_its_step() -> None:
    """The guard must not report `nccl_network_error on rank 0` when rank 1 has left the loop."""
    left = ended_early({0: rank("failed", 103.0), 1: rank("ended", 100.0)})
    assert left is not None
    assert left.ranks == (1,)
    assert left.detail == "rank 1 ended with code 0 at step 15, before rank 0"


@pytest.mark.parametrize(
    "ranks",
    [
        {0: rank("failed", 100.0), 1: rank("ended", 103.0)},
        {0: rank("ended"), 1: rank("ended")},
        {0: rank("running"), 1: rank("running")},
        {0: rank("failed", 100.0), 1: rank("running", 99.0)},
    ],
)
def test_a_rank_that_failed_first_is_its_own_cause(ranks: Mapping[int, Now]) -> None:
    assert ended_early(ranks) is None


@pytest.mark.parametrize(
    ("state", "steps", "words"),
    [
        ("running", 15, "rank 1 died at step 15 (killed, or ended by os._exit), before ranks 0,2"),
        ("failed", 15, "rank 1 ended with an exception at step 15, before ranks 0,2"),
        ("starting", 0, "rank 1 died before its first step (killed, or ended by os._exit)"),
    ],
)
def test_a_dead_rank_under_a_living_launcher_is_reported_with_its_cause(
    state: str, steps: int, words: str
) -> None:
    ranks = {0: rank("running"), 1: rank(state, steps=steps), 2: rank("running")}
    left = left_behind(ranks, {1})
    assert left is not None
    assert left.detail.startswith(words)
    assert left_behind(ranks, {0, 1, 2}) is None, "all have ended: the launcher will"


class States:
    """The last records of a launch's ranks."""

    def __init__(self, stepped: bool, *states: str) -> None:
        self._stepped, self._states = stepped, set(states)

    def all_in(self, states: Collection[str]) -> bool:
        return self._states <= set(states)

    def all_stepped(self) -> bool:
        return self._stepped


@pytest.mark.parametrize(
    ("ranks", "objections", "finished"),
    [
        (States(True, "ended"), [], True),
        (States(True, "ended", "finished"), [], True),
        (States(True, "ended", "running"), [], False),
        (States(True, "ended", "failed"), [], False),
        (States(False, "ended"), [], False),
        (States(True, "ended"), ["cuda_oom"], False),
    ],
)
def test_a_training_without_a_claim_has_finished_by_all_the_evidence_or_not(
    ranks: States, objections: list[str], finished: bool
) -> None:
    """A finished training run must not start from scratch, and a loop that caught its exception and
    exited with 0 must be restarted."""
    assert ran_to_its_end(ranks, objections) is finished
