"""The compiled path and the Python one find the same templates."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.eventlog import line_templates
from miner_guard.eventlog.line_templates import (
    LineChunk,
    TemplateFilter,
    template,
    templates_in_python,
)

Templates = Callable[[bytes], tuple[list[bytes], frozenset[bytes]]]
PATHS = [
    templates_in_python,
    pytest.param(
        line_templates.templates,
        marks=pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler"),
    ),
]
LINES = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"", b"step", b"loss", b"\0", b"step\0", b"x" * 5000])
)
NUMBERS = st.sampled_from([b"0", b"12", b"987", b"3.50", b"-1e-5", b"+.", b"", b"abc", b"AbC"])


def _letters(number: int) -> bytes:
    return str(number).encode().translate(bytes.maketrans(b"0123456789", b"abcdefghij"))


def _expected(text: bytes) -> tuple[list[bytes], frozenset[bytes]]:
    lines = [template(line) for line in text.split(b"\n")]
    return lines, frozenset(lines)


LEAKS = """
import sys
from miner_guard.eventlog._templates import templates
text = b"\\n".join(b"line " + bytes([97 + n % 26, 97 + n % 25]) for n in range(2000))
def allocated():
    before = sys.getallocatedblocks()
    for _ in range(50):
        templates(text)
    return sys.getallocatedblocks() - before
allocated()
print(allocated())
"""


@pytest.mark.parametrize("templates", PATHS)
@given(st.lists(st.one_of(LINES, st.sampled_from([b"a", b"bb"])), max_size=200))
def test_each_line_has_its_template(templates: Templates, lines: list[bytes]) -> None:
    text = b"\n".join(lines)
    assert templates(text) == _expected(text)


@pytest.mark.parametrize("templates", PATHS)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=100))
def test_lines_that_differ_in_numbers_have_one_template(
    templates: Templates, lines: list[tuple[bytes, bytes, bytes]]
) -> None:
    """Each line is compared with the latest line of the same length; that comparison must not take
    a letter for a digit."""
    text = b"\n".join(b"step %s loss %s | %s" % numbers for numbers in lines)
    assert templates(text) == _expected(text)


@pytest.mark.parametrize("templates", PATHS)
@given(st.binary(min_size=1, max_size=40), st.data())
def test_lines_of_one_length_that_differ_in_one_byte(
    templates: Templates, line: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(line) - 1))
    others = [line[:at] + bytes([byte]) + line[at + 1 :] for byte in range(256)]
    text = b"\n".join([line, *others, line])
    assert templates(text) == _expected(text)


@pytest.mark.parametrize("templates", PATHS)
@pytest.mark.parametrize(
    "text",
    [
        b"\n" * 100_000,
        bytes(1_000_000),
        random.Random(1).randbytes(1_000_000),
        b"".join(b"line %s\n" % _letters(n) for n in range(100_000)),
        b"x" * 1_000_000 + b"\n" + b"x" * 1_000_000,
    ],
    ids=["newlines", "NULs", "random", "all differ", "two long lines"],
)
def test_large_texts_have_the_same_templates(templates: Templates, text: bytes) -> None:
    assert templates(text) == _expected(text)


@pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler")
def test_equal_templates_are_one_object() -> None:
    """An object for each line of a flood would cost memory and time."""
    lines, distinct = line_templates.templates(b"Step 1 loss\nother\nstep 22 loss\n" * 1000)
    assert len({id(line) for line in lines}) == len(distinct) == 3


@pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler")
@pytest.mark.parametrize("templates", PATHS)
def test_threads_that_search_at_once_do_not_disturb_each_other(templates: Templates) -> None:
    """The compiled path releases the interpreter lock while it searches a large text."""
    texts = [
        b"".join(b"Step %d of %s\n" % (n, _letters(n % kinds)) for n in range(20_000))
        for kinds in (1, 2, 10, 3000)
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            for text, found in zip(texts * 5, threads.map(templates, texts * 5), strict=True):
                assert found == _expected(text)
    finally:
        sys.setswitchinterval(before)


def test_a_line_that_is_not_bytes_is_refused() -> None:
    for wrong in ("text", None, bytearray(b"text"), 5):
        with pytest.raises(TypeError):
            line_templates.templates(wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(not line_templates.COMPILED, reason="built without a compiler")
def test_the_compiled_path_keeps_no_memory() -> None:
    """Runs in a separate process, where no other test's caches can grow."""
    run = subprocess.run(
        [sys.executable, "-c", LEAKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(run.stdout) < 50


@pytest.mark.parametrize("templates", PATHS)
def test_a_filter_finds_the_same_templates_first_and_later(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache must not treat a template as irrelevant if it contains one of the filter's
    words."""
    monkeypatch.setattr(line_templates, "templates", templates)
    sieve, quiet = TemplateFilter([b"error", b"loss"]), b"all well 1\n" * 50
    for _ in range(3):
        assert sieve.matching(LineChunk(quiet)) == set()
        assert sieve.matching(LineChunk(quiet + b"Er1ror: 7\n" + quiet)) == {b"error: "}
        assert sieve.matching(LineChunk(b"l-oss 3.5\nerror: \n")) == {b"loss ", b"error: "}


@pytest.mark.parametrize("templates", PATHS)
def test_a_filter_that_has_forgotten_finds_the_same_templates(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_templates, "templates", templates)
    sieve, chance = TemplateFilter([b"error"]), random.Random(3)
    for number in range(12):
        words = ["".join(chance.choices("abcd", k=8)) for _ in range(1500)]
        text = "".join(f"{word} error\n{word} none\n" for word in words).encode()
        assert sieve.matching(LineChunk(text)) == {f"{w} error".encode() for w in words}, number
