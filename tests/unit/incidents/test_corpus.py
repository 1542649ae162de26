"""Real excerpts, each with its root cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.config import read_toml
from tests import diagnosis
from tests.support import requires
from tests.unit.incidents.helpers import root

BENIGN = "BENIGN"
EXCERPTS = Path(__file__).with_name("excerpts.toml")


def load(name: str) -> list[diagnosis.Excerpt]:
    return diagnosis.load(EXCERPTS.with_name(name))


OWN = load("excerpts.toml")


def shares(excerpts: list[diagnosis.Excerpt]) -> Iterator[tuple[float, int, str]]:
    """In each setting: the share of faults named right, the benign texts that raised an alarm, and
    both in words."""
    for setting in diagnosis.SETTINGS.values():
        answered = diagnosis.answers(excerpts, setting)
        pairs = [(e.label, answer) for e, answer in zip(excerpts, answered, strict=True)]
        faults = [label == answer for label, answer in pairs if label != BENIGN]
        alarms = sum(label == BENIGN != answer for label, answer in pairs)
        yield sum(faults) / len(faults), alarms, diagnosis.summary(excerpts, answered)


def test_root_causes_of_the_corpus_and_silence_on_the_benign() -> None:
    """A pattern that corrects one label must not break another."""
    share, alarms, words = next(shares(diagnosis.load(requires.corpus("incidents.jsonl"))))
    assert share >= 0.95, words
    assert alarms <= 1, words


PREFIXES = (
    "0|miner  | ",
    "0|miner  | 2026-01-02 03:04:05 +00:00: ",
    "2026-01-02T03:04:05: ",
    "[rank3]: ",
    "[default0]:",
    "2026-07-29T13:21:17.7984785Z ",
    "3: ",
    "miner-1  | ",
    "| Rank 2 | ",
    "2026-01-02 03:04:05.678 | ERROR    | train:main:12 - ",
    "2026-01-02 03:04:05,678 - train - ERROR - ",
    "\x1b[36m(Worker pid=123)\x1b[0m ",
    "[1,3]<stderr>:",
    "Jan  2 03:04:05 host python[123]: ",
)


PREFIXES_PER_EXCERPT = 3
"""Combines each excerpt with some of the prefixes, and each prefix with hundreds of excerpts: all
pairs would take two minutes."""


@pytest.mark.parametrize("number", range(len(PREFIXES)), ids=PREFIXES)
def test_a_prefix_of_each_line_changes_nothing(number: int) -> None:
    prefix = PREFIXES[number]
    stride = len(PREFIXES) // PREFIXES_PER_EXCERPT
    for excerpt in OWN[number % stride :: stride]:
        log = "\n".join(prefix + line for line in excerpt.text.splitlines())
        assert root(log) == root(excerpt.text), log


def test_lines_of_healthy_runs_are_silent_one_by_one() -> None:
    rows = read_toml(EXCERPTS)["excerpt"]
    lines = [x for row in rows if row.get("each_line") for x in row["text"].splitlines()]
    assert lines
    assert not {line: label for line in lines if (label := root(line))}


def test_root_causes_of_our_own_excerpts() -> None:
    """Covers families of messages that are rare in the corpus; each excerpt stands for one
    family."""
    wrong = [
        f"{excerpt.label} taken for {answer}: {excerpt.text.strip()[:120]}"
        for excerpt, answer in zip(OWN, diagnosis.answers(OWN, diagnosis.alone), strict=True)
        if answer != excerpt.label
    ]
    assert not wrong, "\n".join(wrong)


def test_root_causes_of_the_public_threads() -> None:
    """Guards the figures for the threads that the rules are based on."""
    rounds = ("second", "third", "fourth", "fifth")
    sets = ["threads.toml", *(f"{name}_round.toml" for name in rounds)]
    sets.append("third_round_held_out.toml")
    for share, alarms, words in shares([e for s in sets for e in load(s)]):
        assert share >= 0.98, words
        assert alarms == 0, words


def test_root_causes_of_the_round_that_no_rule_comes_from() -> None:
    """83 of the 96 faults were right on the sixth round's first run."""
    for share, alarms, words in shares(load("sixth_round.toml")):
        assert share >= 83 / 96, words
        assert alarms == 0, words
