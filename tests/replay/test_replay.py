"""The watchers draw from each recorded run the facts that are stored beside it."""

from __future__ import annotations

import json

import pytest

from tests.replay.replay import RUNS, facts, names, stored


@pytest.mark.parametrize("name", names())
def test_a_recorded_run_leads_to_the_same_facts(name: str) -> None:
    expected = stored(name).read_text(encoding="utf-8").splitlines()
    now = [json.dumps(fact) for fact in facts(RUNS / f"{name}.jsonl.gz")]
    assert now == expected, f"explain the change, then run: python -m tests.replay.replay {name}"


def test_the_recordings_are_there_and_small() -> None:
    assert len(names()) >= 35
    assert sum(path.stat().st_size for path in RUNS.iterdir()) < 4_000_000
