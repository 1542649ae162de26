"""The numbers in out-of-memory messages of every PyTorch version, and the order of fixes that they
imply."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.config import read_toml
from miner_guard.incidents import oom
from miner_guard.incidents.knowledge import Fix
from miner_guard.incidents.oom import Training

MESSAGES = {
    row["era"]: row for row in read_toml(Path(__file__).parents[1] / "oom_messages.toml")["message"]
}
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}


@pytest.mark.parametrize("era", MESSAGES)
def test_numbers_of_every_era_and_what_they_mean(era: str) -> None:
    numbers = oom.parse(MESSAGES[era]["text"])
    for name, size in MESSAGES[era]["sizes"].items():
        number, unit = size.split() if isinstance(size, str) else (size, "")
        value = float(number) * UNITS.get(unit, 1)
        assert getattr(numbers, name) == pytest.approx(value, rel=1e-6, abs=1 << 20), name
    assert numbers.kind == MESSAGES[era]["kind"]


def test_a_message_without_numbers_is_unknown_and_keeps_the_usual_order() -> None:
    numbers = oom.parse("RuntimeError: CUDA error: out of memory")
    assert numbers.kind == "unknown"
    usual = [Fix("a", "one"), Fix("b", "two")]
    assert oom.fixes(numbers, usual, Training()) == usual


def test_fragmentation_is_fixed_before_the_batch_is_made_smaller() -> None:
    numbers = oom.parse(MESSAGES["torch 1.13"]["text"])
    first, second, *_ = oom.fixes(numbers, [Fix("smaller batch"), Fix("b")], Training())
    assert "expandable_segments:True" in first.do
    assert "5.00 GiB" in first.do
    assert second.do == "smaller batch"


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        # Source 004's run: 64 accumulation steps on each of 4 GPUs become 128.
        (Training(batch_size=2, effective_batch_size=512, world_size=4), "from 2 to 1"),
        (Training(batch_size=2, effective_batch_size=512, world_size=4), "from 64 to 128"),
        (Training(batch_size=1), "already 1"),
    ],
)
def test_the_runs_own_settings_are_in_the_fix(training: Training, expected: str) -> None:
    fix = oom.fixes(oom.parse(MESSAGES["torch 2.0"]["text"]), [Fix("usual")], training)[0]
    assert expected in fix.do
