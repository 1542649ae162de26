"""The facts that the guard derives from an expression hold for every text that the expression
matches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.log_text import clean
from miner_guard.incidents.patterns import Pattern
from miner_guard.incidents.regexes import (
    NOTHING,
    AllOf,
    AnyOf,
    RegexSearch,
    alternatives,
    met,
    requirement,
    superlinear,
    width,
    words_of,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from tests.unit.incidents.adversaries import adversaries, distinct

EXCERPTS = Path(__file__).with_name("excerpts.toml")


@pytest.mark.parametrize(
    ("regex", "needed"),
    [
        ("out of memory", b"out of memory"),
        (r"\bout of.{0,9}memory", AllOf((b"out of", b"memory"))),
        ("connection (?:refused|reset)", AllOf((b"connection re", AnyOf((b"fused", b"set"))))),
        ("nccl|gloo", AnyOf((b"nccl", b"gloo"))),
        ("(?:lost )?link", b"link"),
        ("(?:lost ){2}link", AllOf((b"lost ", b"link"))),
        ("lost(?! link)", b"lost"),
        (r"\d{3}", NOTHING),
        ("nccl|[a-z]", NOTHING),
    ],
)
def test_the_words_that_an_expression_needs(regex: str, needed: object) -> None:
    assert requirement(regex) == needed


@pytest.mark.parametrize(
    ("regex", "parts"),
    [
        ("a|b(?:c|d)|e", ["a", "b(?:c|d)", "e"]),
        (r"[|]|\||[^]|]", ["[|]", r"\|", "[^]|]"]),
        (r"(?:a|\)|b)", [r"(?:a|\)|b)"]),
    ],
)
def test_the_alternatives_of_an_expression(regex: str, parts: list[str]) -> None:
    assert alternatives(regex) == parts


def test_a_long_line_is_searched_around_its_rarest_word() -> None:
    """Only noise surrounded the first and the last occurrences of a frequent word."""
    line = "error " * 2000 + "error in shard 7 " + "error " * 2000
    assert RegexSearch(r"error in (?:shard|part) \d").found_in(line)
    assert not RegexSearch(r"error in (?:shard|part) [a-z]").found_in(line)


def test_requiring_its_words_loses_no_known_error() -> None:
    matched = 0
    for row in tomllib.loads(EXCERPTS.read_text(encoding="utf-8"))["excerpt"]:
        for line in row["text"].splitlines():
            lowered = clean(line.encode())[1].lower()
            for entry in knowledge.load().entries:
                if entry.search is not None and entry.search.regex.search(lowered):
                    matched += 1
                    words = {word for word in words_of(entry.needs) if word in lowered.encode()}
                    assert met(entry.needs, words), (entry.expression, lowered)
    assert matched > 500


@pytest.mark.parametrize(
    "regex",
    [
        r"wallet\S*.{0,120}denied",
        "a.*b",
        "x|(?:lost )+link",
        r"^killed\s*.*x",
        "^(?:ab?)*x",
        "a(?=.*b)",
        "^a|b+c",
    ],
)
def test_what_may_take_more_than_linear_time_is_refused(regex: str) -> None:
    assert superlinear(regex)


@pytest.mark.parametrize(
    "regex", [r"a\w{0,40}.{0,80}b", "^(?!.*lost).*found", r"^error: \S+ x|b{1,9}", "plain"]
)
def test_what_is_linear_is_not(regex: str) -> None:
    assert superlinear(regex) is None


@pytest.mark.parametrize("entry", distinct(knowledge.load().entries))
def test_a_long_line_shows_what_a_short_one_shows(entry: Pattern) -> None:
    """In a long line, and only there, the scanner searches just around an expression's words. If
    the expression has unbounded length, it searches at the line's beginning."""
    assert entry.search is not None
    before = "" if width(entry.search.expression) is None else ". " * 600 + entry.has[0] + " "
    for text in adversaries(entry.search.expression, 80):
        line = before + text + " ." * 600
        words = {word for word in entry.literals if word in line.encode()} | entry.any_of
        there = entry.search.regex.search(line) is not None
        present = words - entry.none_of
        assert (entry.possible(present) and entry.matches(line, present)) == there, line
