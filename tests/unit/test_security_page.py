"""SECURITY.md: each of its sentences is attacked by a test that exists."""

from __future__ import annotations

import re

from tests.support import requires

PAGE = (requires.REPO / "SECURITY.md").read_text(encoding="utf-8")


def test_every_sentence_names_a_test_that_exists() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and "attacked by" not in row]
    assert len(rows) > 30
    for row in rows:
        sentence, named = (cell.strip() for cell in row.strip("|").split("|"))
        path, _, test = named.strip("`").partition("::")
        assert sentence
        source = (requires.REPO / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {re.escape(test)}\(", source, re.MULTILINE), row
