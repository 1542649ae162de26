"""docs/promises.md lists every promise of the source documents, and each row names tests that
exist."""

from __future__ import annotations

import re
from collections import Counter

from tests.promises import promises
from tests.support.requires import REPO

PROMISED = {"000": 11, "001": 9, "002": 12, "003": 19, "004": 28, "trainers": 34}


def test_every_promise_has_its_row() -> None:
    rows = list(promises())
    assert Counter(row.source for row in rows) == PROMISED
    assert len({(row.source, row.promise) for row in rows}) == sum(PROMISED.values())


def test_each_row_names_tests_that_exist() -> None:
    """Otherwise a promise would keep pointing to a test that was renamed or deleted."""
    for row in promises():
        assert row.tests, row.promise
        for file, name in row.tests:
            source = (REPO / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{row.promise}: {name}"
