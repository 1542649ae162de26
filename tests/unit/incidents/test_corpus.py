"""The corpus next to the repository: real excerpts, each with its root cause. Prints the confusion
table."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from miner_guard.incidents import knowledge
from tests import diagnosis
from tests.support import requires
from tests.unit.incidents.helpers import root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BENIGN = "BENIGN"
EXCERPTS = Path(__file__).with_name("excerpts.toml")


def test_root_causes_of_the_corpus_and_silence_on_the_benign() -> None:
    """A pattern that corrects one label must not break another."""
    rows = [
        json.loads(line)
        for line in requires.corpus("incidents.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    pairs = Counter(
        (diagnosis.RENAMED.get(row["label"], row["label"]), root(row["text"]) or BENIGN)
        for row in rows
    )
    print(confusion(pairs))
    faults = sum(n for (label, _), n in pairs.items() if label != BENIGN)
    right = sum(n for (label, answer), n in pairs.items() if label != BENIGN and label == answer)
    flagged = sum(n for (label, answer), n in pairs.items() if label == BENIGN and answer != BENIGN)
    assert right / faults >= 0.95
    assert flagged <= 1


def confusion(pairs: Counter[tuple[str, str]]) -> str:
    """One row per label: its excerpts, how many got the right label, and the labels that the others
    got."""
    rows = [f"{'label':28} {'n':>4} {'right':>5}  taken for"]
    for label in sorted({label for label, _ in pairs}):
        answers = {answer: n for (name, answer), n in pairs.items() if name == label}
        wrong = ", ".join(
            f"{answer} {n}" for answer, n in sorted(answers.items()) if answer != label
        )
        rows.append(f"{label:28} {sum(answers.values()):4} {answers.get(label, 0):5}  {wrong}")
    return "\n".join(rows)


@functools.cache
def _excerpts() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _toml(EXCERPTS)["excerpt"]
    return rows


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


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
    for row in _excerpts()[number % stride :: stride]:
        log = "\n".join(prefix + line for line in row["text"].splitlines())
        assert root(log) == root(row["text"]), log


def test_lines_of_healthy_runs_are_silent_one_by_one() -> None:
    rows = [row for row in _toml(EXCERPTS)["excerpt"] if row.get("each_line")]
    matching = {
        line: label for row in rows for line in row["text"].splitlines() if (label := root(line))
    }
    assert not matching


def test_root_causes_of_our_own_excerpts() -> None:
    """Covers families of messages that are rare in the corpus; each excerpt stands for one
    family."""
    rows = [row for row in _toml(EXCERPTS)["excerpt"] if "skip" not in row]
    unheard = {row["label"] for row in rows} - {*knowledge.load().labels, BENIGN}
    assert not unheard, f"no file in miner_guard/incidents defines the label {sorted(unheard)}"
    wrong = [
        f"{row['label']} taken for {answer}: {row['text'].strip()[:120]}"
        for row in rows
        if (answer := root(row["text"]) or BENIGN) != row["label"]
    ]
    assert not wrong, "\n".join(wrong)


def test_root_causes_of_the_public_threads() -> None:
    """Guards the share published in docs/diagnosis.md for the threads that the rules are based
    on."""
    rounds = ("second", "third", "fourth", "fifth")
    sets = ["threads.toml", *(f"{name}_round.toml" for name in rounds)]
    sets.append("third_round_held_out.toml")
    excerpts = [e for name in sets for e in diagnosis.load(EXCERPTS.with_name(name))]
    for setting in diagnosis.SETTINGS.values():
        answered = diagnosis.answers(excerpts, setting)
        right = sum(e.label == answer for e, answer in zip(excerpts, answered, strict=True))
        assert right / len(excerpts) >= 0.98, diagnosis.summary(excerpts, answered)


SIXTH_ROUND_RIGHT = 83
"""Correct out of 96 faults, in each setting, on the first run: before any rule was based on
them."""


def test_root_causes_of_the_round_that_no_rule_comes_from() -> None:
    """Guards the sixth round's share published in docs/diagnosis.md, and keeps its benign texts
    benign."""
    excerpts = diagnosis.load(EXCERPTS.with_name("sixth_round.toml"))
    for setting in diagnosis.SETTINGS.values():
        answered = diagnosis.answers(excerpts, setting)
        pairs = list(zip(excerpts, answered, strict=True))
        right = sum(e.label == answer for e, answer in pairs if e.label != BENIGN)
        assert right >= SIXTH_ROUND_RIGHT, diagnosis.summary(excerpts, answered)
        assert all(answer == BENIGN for e, answer in pairs if e.label == BENIGN)
