"""Measures root-cause accuracy on a file of labelled logs: `python -m tests.diagnosis FILE
[--wrong]`.

FILE is TOML (`[[excerpt]]` tables) or JSON lines; each entry has `label` and `text`, and may have
`source`. `label` is one of the labels of miner_guard/incidents, or `BENIGN` where nothing is wrong.
Every text is judged three times: alone, buried in a busy log, and followed by what the other ranks
and a launcher print after a fault. docs/diagnosis.md explains it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from miner_guard.incidents import knowledge
from tests.unit.incidents.helpers import root
from tests.unit.incidents.teardown import CONSEQUENCES, SUMMARY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BENIGN = "BENIGN"
BURIED_LINES = 2000
RENAMED = {"nan_loss": "loss_nan"}
"""Labels that older labelled files use."""

_95 = 1.959964
"""Standard deviations around the mean that cover 95 % of a normal distribution."""

_BUSY = (
    "[rank{r}]: allreduce of 128 MB took {ms} ms",
    (
        "Outer Step: 56 | Inner Step: {n} | LR: 0.00002100 | Loss: 3.{ms} | Step Time: "
        "15.2s | GPU Mem: 18.45GB"
    ),
    "2026-01-02 03:04:05.678 | INFO     | train:loop:{n} - fetched {ms} pages",
    "GPU {r}: 71 C, 312 W, 18.3 / 24.0 GB",
    "{n}/90000 [1:02:03<9:08:07,  2.1s/it]",
)
_QUIET = tuple(line for line in _BUSY if "Loss" not in line)
"""Output of the other ranks while one fails. It contains no steps, which would show that training
continued."""


@dataclass(frozen=True)
class Excerpt:
    """One labelled log."""

    label: str
    text: str
    source: str = ""


class BadFile(Exception):
    """A labelled file can't be used; the message says why and what to do."""


def load(path: Path) -> list[Excerpt]:
    """The excerpts of a file. Raises BadFile."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            rows = tomllib.loads(text)["excerpt"]
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        excerpts = [
            Excerpt(RENAMED.get(r["label"], r["label"]), r["text"], r.get("source", ""))
            for r in rows
            if "skip" not in r
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(
            f"{path}: {error!r}; it needs entries with `label` and `text`, as TOML or JSON lines"
        ) from error
    known = {BENIGN, *knowledge.load().labels}
    if unknown := sorted({e.label for e in excerpts} - known):
        raise BadFile(f"{path}: unknown label {unknown[0]}; known: {', '.join(sorted(known))}")
    return excerpts


def alone(excerpt: Excerpt) -> str:
    """The text as it appears in its thread."""
    return excerpt.text


def buried(excerpt: Excerpt) -> str:
    """The text after `BURIED_LINES` ordinary lines, interleaved with the lines of other ranks."""
    chance = random.Random(excerpt.text)
    lines = [_busy(chance, _BUSY) for _ in range(BURIED_LINES)]
    for line in excerpt.text.splitlines():
        lines += [line, *(_busy(chance, _QUIET) for _ in range(chance.randrange(3)))]
    if excerpt.label == BENIGN:
        lines += [_busy(chance, _BUSY) for _ in range(BURIED_LINES // 10)]
    return "\n".join(lines) + "\n"


def after_teardown(excerpt: Excerpt) -> str:
    """The text followed by the output of the other ranks and torchrun. A benign text stays
    unchanged, because no teardown follows it."""
    if excerpt.label == BENIGN:
        return excerpt.text
    others = [CONSEQUENCES[rank % len(CONSEQUENCES)].format(rank=rank) for rank in range(1, 4)]
    return "\n".join([excerpt.text.rstrip("\n"), *others, SUMMARY])


SETTINGS: dict[str, Callable[[Excerpt], str]] = {
    "alone": alone,
    f"buried in {BURIED_LINES} lines": buried,
    "after a teardown": after_teardown,
}


def answers(excerpts: Sequence[Excerpt], setting: Callable[[Excerpt], str]) -> list[str]:
    """The answer for each excerpt in this setting."""
    return [root(setting(excerpt)) or BENIGN for excerpt in excerpts]


def wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927); (0, 1) if nothing was counted."""
    if not of:
        return 0.0, 1.0
    share, z2 = right / of, _95**2
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return max(0.0, middle - half), min(1.0, middle + half)


def summary(excerpts: Sequence[Excerpt], answered: Sequence[str]) -> str:
    """How many faults got the right label, a wrong one and none, and how many benign texts raised
    an alarm."""
    pairs = [(e.label, answer) for e, answer in zip(excerpts, answered, strict=True)]
    faults = [(label, answer) for label, answer in pairs if label != BENIGN]
    right = sum(label == answer for label, answer in faults)
    missed = sum(answer == BENIGN for _, answer in faults)
    quiet = [answer for label, answer in pairs if label == BENIGN]
    return (
        f"root cause right {_share(right, len(faults))}, wrong {len(faults) - right - missed}, "
        f"none {missed}; "
        f"benign texts alarmed {sum(answer != BENIGN for answer in quiet)} of {len(quiet)}"
    )


def _share(right: int, of: int) -> str:
    if not of:
        return "-"
    low, high = wilson(right, of)
    return f"{right}/{of} = {right / of:.0%} ({low:.0%}-{high:.0%})"


def _busy(chance: random.Random, lines: Sequence[str]) -> str:
    return chance.choice(lines).format(
        r=chance.randrange(8), n=chance.randrange(10, 90), ms=chance.randrange(100, 999)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures of one file. Returns 0 if they were printed, 2 if the file can't be
    used."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.diagnosis", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--wrong", action="store_true", help="list each text that was not named right"
    )
    given = parser.parse_args(arguments)
    try:
        excerpts = load(given.file)
    except BadFile as error:
        print(error, file=sys.stderr)
        return 2
    for name, setting in SETTINGS.items():
        answered = answers(excerpts, setting)
        print(f"\n{name}: {summary(excerpts, answered)}")
        if given.wrong:
            for excerpt, answer in zip(excerpts, answered, strict=True):
                if answer != excerpt.label:
                    print(f"  {excerpt.label} taken for {answer}: {excerpt.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
