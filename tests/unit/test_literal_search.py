"""Every literal search gives the same answer as asking for each literal separately."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.eventlog import literal_search
from miner_guard.eventlog.literal_search import HyperscanSearch, IndexSearch, LiteralSearch
from tests.support import requires

SEARCHES: list[Callable[[Sequence[bytes]], LiteralSearch]] = [IndexSearch]
if literal_search.hyperscan is not None:
    SEARCHES.append(HyperscanSearch)


@pytest.mark.parametrize("search", SEARCHES)
@given(
    words=st.lists(st.text("ab(.", min_size=1, max_size=6).map(str.encode), min_size=1, max_size=8),
    text=st.text("ab(.\0", max_size=60).map(str.encode),
)
def test_it_finds_the_literals_in_the_text(
    search: Callable[[Sequence[bytes]], LiteralSearch], words: list[bytes], text: bytes
) -> None:
    assert search(words).find(text) == {word for word in words if word in text}


def test_an_old_processor_gets_the_slower_search(monkeypatch: pytest.MonkeyPatch) -> None:
    requires.module("hyperscan")
    monkeypatch.setattr(literal_search, "HyperscanSearch", _refuse)
    assert literal_search.literal_search([b"error"]).find(b"an error") == {b"error"}


def _refuse(words: Sequence[bytes]) -> LiteralSearch:
    raise literal_search.hyperscan.error("no SSSE3")


def test_several_threads_search_at_once() -> None:
    """Hyperscan's working memory serves one search at a time."""
    search = literal_search.literal_search([b"error", b"fail"])
    text = b"x" * 100_000 + b"error"
    answers: list[set[bytes]] = []

    def look() -> None:
        answers.extend(search.find(text) for _ in range(200))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{b"error"}] * 800
