"""Lines are split alike by the compiled path and by the Python one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.eventlog import line_templates
from miner_guard.eventlog.line_templates import LineChunk, TemplateFilter, split_in_python

Split = Callable[[bytes], tuple[list[bytes], frozenset[bytes]]]
SPLITS = [
    split_in_python,
    pytest.param(
        line_templates.split,
        marks=pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler"),
    ),
]
LINES = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"", b"step", b"loss", b"\0", b"step\0", b"x" * 5000])
)
LEAKS = """
import sys
from miner_guard.eventlog._lines import split
text = b"\\n".join(b"line %d" % (n % 700) for n in range(2000))
def allocated():
    before = sys.getallocatedblocks()
    for _ in range(50):
        split(text)
    return sys.getallocatedblocks() - before
allocated()
print(allocated())
"""


@pytest.mark.parametrize("split", SPLITS)
@given(st.lists(st.one_of(LINES, st.sampled_from([b"a", b"bb"])), max_size=200))
def test_lines_are_those_between_newlines(split: Split, lines: list[bytes]) -> None:
    text = b"\n".join(lines)
    assert split(text) == (text.split(b"\n"), frozenset(text.split(b"\n")))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "text",
    [
        b"\n" * 100_000,
        bytes(1_000_000),
        random.Random(1).randbytes(1_000_000),
        b"".join(b"line %d\n" % n for n in range(100_000)),
        b"x" * 1_000_000 + b"\n" + b"x" * 1_000_000,
    ],
    ids=["newlines", "NULs", "random", "all differ", "two long lines"],
)
def test_large_texts_are_split_alike(split: Split, text: bytes) -> None:
    assert split(text) == (text.split(b"\n"), frozenset(text.split(b"\n")))


@pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler")
def test_equal_lines_are_one_object() -> None:
    """Guards against the memory and time of an object for each line of a flood."""
    lines, distinct = line_templates.split(b"step loss\nother\n" * 1000)
    assert len({id(line) for line in lines}) == len(distinct) == 3


@pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler")
def test_what_is_no_bytes_is_refused() -> None:
    for wrong in ("text", None, bytearray(b"text"), 5):
        with pytest.raises(TypeError):
            line_templates.split(wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler")
def test_the_compiled_split_keeps_no_memory() -> None:
    """In a separate process: other tests' caches would grow beside it."""
    run = subprocess.run(
        [sys.executable, "-c", LEAKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(run.stdout) < 50


@pytest.mark.parametrize("split", SPLITS)
def test_a_filter_finds_the_same_templates_first_and_later(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a template that is remembered as quiet though it contains a word."""
    monkeypatch.setattr(line_templates, "split", split)
    sieve, quiet = TemplateFilter([b"error", b"loss"]), b"all well 1\n" * 50
    for _ in range(3):
        assert sieve.matching(LineChunk(quiet)) == set()
        assert sieve.matching(LineChunk(quiet + b"Er1ror: 7\n" + quiet)) == {b"error: "}
        assert sieve.matching(LineChunk(b"l-oss 3.5\nerror: \n")) == {b"loss ", b"error: "}


@pytest.mark.parametrize("split", SPLITS)
def test_a_filter_that_has_forgotten_finds_the_same_templates(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_templates, "split", split)
    sieve, chance = TemplateFilter([b"error"]), random.Random(3)
    for number in range(12):
        words = ["".join(chance.choices("abcd", k=8)) for _ in range(1500)]
        text = "".join(f"{word} error\n{word} none\n" for word in words).encode()
        assert sieve.matching(LineChunk(text)) == {f"{w} error".encode() for w in words}, number
