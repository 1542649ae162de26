"""`diagnose` over three real ranks: the guard names silent ranks in time, and leaves correct
placements alone. `tests/unit/test_across_ranks.py` has the wrong ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import launch

SCRIPT = Path(__file__).with_name("placements.py")

RANKS = 3


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The data that rank 0 gathered and printed in each case in placements.py."""
    out = tmp_path_factory.mktemp("ranks") / "rank0.json"
    done = subprocess.run(
        launch(RANKS, str(SCRIPT), str(out)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


def checks(answer: Any) -> set[str]:
    return {s["fields"]["check"] for s in answer["said"] if "check" in s["fields"]}


def test_a_cpu_run_that_asked_for_the_cpu_names_every_device_and_raises_no_alarm(
    answers: Any,
) -> None:
    answer = answers["plain"]
    assert [s["event"] for s in answer["said"]] == ["gpu_diagnostics"]
    block = answer["said"][0]["line"]
    assert "✗ CUDA available: False" in block
    assert "✓ Gradient accumulation steps: 256" in block
    assert "rank 0: device cpu" in block
    assert "rank 1: device cpu" in block


def test_with_a_gpu_expected_both_red_flags_are_up(answers: Any) -> None:
    lines = [s["line"] for s in answers["gpu_expected"]["said"]]
    assert "CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)" in lines
    assert "Model is on CPU! This will be EXTREMELY SLOW!" in lines


def test_a_rank_that_never_calls_diagnose_is_named_and_the_group_survives(answers: Any) -> None:
    answer = answers["silent"]
    assert 2 <= answer["seconds"] < 60
    assert [bool(r.get("error")) for r in answer["reports"]] == [False, True, False]
    assert checks(answer) == {"silent_rank"}
    assert answer["sum"] == RANKS


def test_a_legitimate_cpu_offload_is_not_reported_as_fallback(answers: Any) -> None:
    answer = answers["offload"]
    assert [s["event"] for s in answer["said"]] == ["gpu_diagnostics"]
    assert all(r["offload"] for r in answer["reports"])
    assert {d for r in answer["reports"] for d in r["shards"]} == {"cpu"}


def test_with_a_supervisor_the_journal_has_everything_and_nothing_is_printed_twice(
    answers: Any,
) -> None:
    answer = answers["supervised"]
    kinds = [e["kind"] for e in answer["journal"]]
    assert kinds == ["training", "diagnosis"]
    assert answer["journal"][0]["accumulation_steps"] == 256
    assert answer["said"] == []
