"""The words of a text, with Hyperscan and without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.system import word_search
from miner_guard.system.word_search import WordSearch

WORDS = [b"error", b"Err", b"no space", b"xid 79", "已杀死".encode()]
TEXTS = st.lists(
    st.sampled_from(
        [b"ERROR", b"rr", b"\n", b"no ", b"space", b"Xid 79", "已杀死".encode(), b"x\0"]
    )
).map(b"".join)


@pytest.fixture(params=["hyperscan", "plain"], scope="module")
def search(request: pytest.FixtureRequest) -> Iterator[WordSearch]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(word_search, "hyperscan", None)
        elif word_search.hyperscan is None:
            pytest.skip("no hyperscan on this platform")
        found = WordSearch(WORDS)
        assert (found._each_once is None) is (request.param == "plain")
        assert (found._every is None) is (request.param == "plain")
        yield found


@given(text=TEXTS)
def test_it_finds_each_word_and_each_line_with_one(search: WordSearch, text: bytes) -> None:
    small = [word.lower() for word in WORDS]
    assert search.found_in(text) == {word for word in small if word in text.lower()}
    lines = [line for line in text.split(b"\n") if any(word in line.lower() for word in small)]
    assert [text[start:end] for start, end in search.lines_in(text)] == lines


def test_no_words_are_never_found_and_an_empty_word_is_refused() -> None:
    assert WordSearch([]).found_in(b"text") == set()
    assert WordSearch([]).lines_in(b"text") == []
    with pytest.raises(ValueError, match="empty"):
        WordSearch([b""])
