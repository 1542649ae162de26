"""Lines that differ only in digits are judged once, yet each gets the verdict that it would get
alone."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miner_guard.incidents import knowledge
from miner_guard.incidents.log_lines import LineReader, log_line
from miner_guard.incidents.log_text import clean
from miner_guard.incidents.regexes import RegexSearch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXCERPTS = Path(__file__).with_name("excerpts.toml")

PARTS = st.sampled_from(
    [
        "[rank12]: ",
        "[default3]:",
        "17: ",
        "250: ",
        "450: ",
        "12|miner  | ",
        "2026-01-02 03:04:05 ",
        "\x1b[32m",
        "[1m",
        "[0;31mab",
        "RANK 3 | ",
        "ValueError: case 401 failed",
        "torch.Error9: 0",
        "x.exc.Odd1: 5",
        "queue.Empty2: ",
        "Traceback (most recent call last):",
        '  File "/a.py", line 3, in f',
        "    raise X1",
        "{",
        " ",
        "\t",
        "\r",
        "\0",
        "é7",
        "1",
        "m1",
    ]
)


def _renumbered(text: str, chance: random.Random) -> str:
    return "".join(chance.choice("0123456789") if c in "0123456789" else c for c in text)


@example("450: ValueError: 3", 1)
@example("1\r17:     raise X1", 0)
@example("\x1b[0mValueError: 3", 1)
@settings(max_examples=400)
@given(st.lists(PARTS, max_size=5).map("".join), st.integers())
def test_a_line_of_a_known_shape_is_read_like_a_new_one(text: str, seed: int) -> None:
    """It has its own rank, prefix and name, not those of the first line with its shape."""
    reader, chance = LineReader(knowledge.load().words), random.Random(seed)
    for line in (text, *(_renumbered(text, chance) for _ in range(6)), text):
        raw = line.encode()
        assert reader.read(raw, 7) == log_line(clean(raw)[0], 7, clean(raw)[1])._replace(raw=raw)


def test_a_reader_forgets_and_still_reads() -> None:
    reader = LineReader(knowledge.load().words)
    for letters in range(3000):
        word = f"{letters:b}".replace("0", "a").replace("1", "b")
        assert reader.read(f"{word}Error: 3".encode(), 1).text == f"{word}Error: 3"


def test_digits_decide_where_a_pattern_reads_them() -> None:
    """Each status, exit code and Xid gets its own answer, whichever came first."""
    known = knowledge.load()
    for first, second in (
        ("xid (pci:0000:01:00): 79, gpu has fallen off the bus.", "xid (pci:0000:01:00): 13, pid"),
        (
            "requests.exceptions.httperror: 401 client error",
            "requests.exceptions.httperror: 404 client error",
        ),
        ("error: process exited with exit code 137", "error: process exited with exit code 0"),
    ):
        assert known.match(first) != known.match(second)
        for text in (first, second, first):
            assert known.match(text) == known._look_up(text, frozenset())


def test_each_known_text_has_its_own_answer_after_texts_with_other_digits() -> None:
    warm, chance = knowledge.load(), random.Random(3)
    excerpts = tomllib.loads(EXCERPTS.read_text(encoding="utf-8"))["excerpt"]
    for excerpt in excerpts:
        for line in excerpt["text"].lower().splitlines()[:20]:
            texts = [_renumbered(line, chance) for _ in range(3)]
            for text in (*texts, line):
                assert warm.match(text) == warm._look_up(text, frozenset())


@pytest.mark.parametrize(
    ("expression", "apart"),
    [
        (r"\d{1,3}", False),
        ("[0-9a-f]", False),
        (r"\w\b.x{3}", False),
        ("[^a]", False),
        ("[1-9]", True),
        ("errno 28", True),
        ("[^1]", True),
        ("a(?:b|c9)", True),
        ("(?:x7){1,4}", True),
        ("a(?!8)", True),
        (r"(\d)\1", True),
    ],
)
def test_an_expression_tells_digits_apart(expression: str, apart: bool) -> None:
    assert RegexSearch(expression).tells_digits_apart is apart
