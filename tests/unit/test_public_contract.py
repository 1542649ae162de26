"""Guards against a rename that breaks somebody's grep, script or guard.toml without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract import listing

COMMITTED: dict[str, Any] = json.loads(listing.PUBLIC.read_text(encoding="utf-8"))
TODAY: dict[str, Any] = json.loads(listing.text())


@pytest.mark.parametrize("kind", sorted(COMMITTED))
def test_what_people_rely_on_is_as_committed(kind: str) -> None:
    assert TODAY[kind] == COMMITTED[kind], (
        "update the listing with `python -m tests.contract.listing`, and CHANGELOG.md with it "
        "if an existing row changed"
    )
