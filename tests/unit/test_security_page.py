"""SECURITY.md: for each sentence there is a test that attacks it."""

from __future__ import annotations

import re

from tests.support import requires

PAGE = (requires.REPO / "SECURITY.md").read_text(encoding="utf-8")


def test_every_sentence_names_a_test() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and "attacked by" not in row]
    assert len(rows) > 30
    for row in rows:
        sentence, named = (cell.strip() for cell in row.strip("|").split("|"))
        assert sentence
        assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", named), row


def test_every_named_test_exists() -> None:
    for path, test in re.findall(r"`(tests/[^:`]+)::(\w+)`", PAGE):
        source = (requires.REPO / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{path}::{test}"


def test_every_attack_runs_with_the_others() -> None:
    """A sentence's test must not wait for a target that people seldom run."""
    for path, test in re.findall(r"`(tests/[^:`]+)::(\w+)`", PAGE):
        source = (requires.REPO / path).read_text(encoding="utf-8")
        head = source.partition(f"\ndef {test}(")[0].rpartition("\n\n\n")[2]
        assert "mark.long" not in head, f"{path}::{test}"
        assert not re.search(r"^pytestmark = .*mark\.long", source, re.MULTILINE), path
