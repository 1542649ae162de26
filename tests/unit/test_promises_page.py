"""tests/promises.toml lists every promise of the source documents, each with tests that exist;
docs/promises.md explains each deliberate difference."""

from __future__ import annotations

import re
from collections import Counter

from tests.promises import promises
from tests.support.requires import REPO

PROMISED = {"000": 11, "001": 9, "002": 12, "003": 19, "004": 28, "trainers": 34}


def test_every_promise_is_listed_once() -> None:
    rows = list(promises())
    assert Counter(row.source for row in rows) == PROMISED
    assert len({(row.source, row.text) for row in rows}) == sum(PROMISED.values())


def test_each_promise_names_tests_that_exist() -> None:
    """Otherwise a promise would keep pointing to a test that was renamed or deleted."""
    for row in promises():
        assert row.tests, row.text
        for file, name in row.tests:
            source = (REPO / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{row.text}: {name}"


def test_the_page_explains_exactly_the_promises_that_differ() -> None:
    page = (REPO / "docs" / "promises.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| (\d{3}|trainers) \| ((?:\\\||[^|])+?) \| \S", page, re.MULTILINE)
    differing = [(row.source, row.text.replace("|", "\\|")) for row in promises() if row.differs]
    assert explained == differing
