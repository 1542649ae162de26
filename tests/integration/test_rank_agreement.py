"""Under FSDP, a rank that acts differently leaves the others in a collective forever, so all ranks
must get the same answers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from miner_guard.state_dir import StateDir
from miner_guard.uploads.gate import GateInputs, write
from miner_guard.validators.facts import Published
from tests.support import requires
from tests.support.launcher import launch
from tests.support.ranks import Ranks

RANKS = 3
"""A leader, the rank that deviates, and one in between."""

TIMEOUT_S = 2.0
SETTINGS = {"gate": {"min_upload_interval_s": 600.0, "broadcast_timeout_s": TIMEOUT_S}}


def change_forever(path: Path, stop: threading.Event) -> None:
    """Alternate without pause between published just now (too soon) and published long ago
    (allowed)."""
    for age_s in itertools.cycle((1.0, 5000.0)):
        if stop.is_set():
            return
        now = time.monotonic()
        write(
            path,
            GateInputs(Published(age_s=age_s, reason=None, seen_at=now), written_monotonic=now),
        )
        time.sleep(0.0005)


Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ranks, Answers]:
    requires.module("torch")
    folder = tmp_path_factory.mktemp("ranks")
    state = StateDir(folder / "state")
    stop = threading.Event()
    changer = threading.Thread(target=change_forever, args=(state.gate_inputs, stop))
    changer.start()
    ranks = Ranks()
    env = {**os.environ, **ranks.env, "_MINER_GUARD_RANK_SETTINGS": json.dumps(SETTINGS)}
    script = Path(__file__).with_name("agreeing_ranks.py")
    try:
        subprocess.run(launch(RANKS, str(script), str(folder)), env=env, check=True, timeout=150)
    finally:
        stop.set()
        changer.join()
    return ranks, [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(RANKS)]


def test_all_ranks_have_the_same_answer_while_the_repo_changes_under_them(
    run: tuple[Ranks, Answers],
) -> None:
    first, *others = run[1]
    assert {a["allowed"] for a in first["together"]} == {True, False}, "the state did not change"
    for other in others:
        assert other["together"] == first["together"]
        assert other["notices"] == first["notices"]


def test_ranks_would_differ_without_the_exchange(run: tuple[Ranks, Answers]) -> None:
    first, *others = run[1]
    assert any(other["each by itself"] != first["each by itself"] for other in others)


def test_ranks_that_ask_different_questions_are_all_blocked_and_can_agree_again(
    run: tuple[Ranks, Answers],
) -> None:
    for answers in run[1]:
        assert not answers["different questions"]["allowed"]
        assert "different questions" in answers["different questions"]["reason"]
        assert answers["after that"] == run[1][0]["after that"]


def test_if_one_rank_never_asks_the_others_are_blocked_in_time_without_raising(
    run: tuple[Ranks, Answers],
) -> None:
    ranks, all_answers = run
    for rank, answers in enumerate(all_answers):
        assert not answers["one is silent"]["allowed"]
        assert not answers["ever after"]["allowed"]
        assert answers["waited_s"] < TIMEOUT_S + 20
        assert answers["errors"] > 0
        assert ranks.now(rank).state == "finished"
        assert rank == 0 or ranks.messages(rank)
    assert (
        f"not every rank asked within {TIMEOUT_S:g} s" in all_answers[0]["one is silent"]["reason"]
    )
    assert "every rank must ask at the same step" in all_answers[0]["ever after"]["reason"], (
        "a person must know what to do"
    )
