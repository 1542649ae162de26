"""A rename must not silently break somebody's grep, script or guard.toml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.contract import listing


def test_what_people_rely_on_is_as_committed() -> None:
    """New rows may be added; `python -m tests.contract.listing` writes them into the listing."""
    committed = json.loads(listing.PUBLIC.read_text(encoding="utf-8"))
    today = json.loads(listing.text())
    assert list(_broken(committed, today, "")) == [], (
        "a public name is gone or changed: restore it, or update the listing and CHANGELOG.md"
    )


def test_the_comparison_sees_what_is_gone_and_what_changed() -> None:
    committed = {"events": {"slow_step": {"level": "warning"}}, "files": ["lock", "guard.jsonl"]}
    today = {"events": {"slow_step": {"level": "info"}}, "files": ["lock", "new"]}
    assert list(_broken(committed, today, "")) == [
        "/events/slow_step/level: 'warning' became 'info'",
        "/files: 'guard.jsonl' is gone",
    ]


def _broken(committed: Any, today: Any, where: str) -> Iterator[str]:
    if isinstance(committed, dict) and isinstance(today, dict):
        for key, value in committed.items():
            if key in today:
                yield from _broken(value, today[key], f"{where}/{key}")
            else:
                yield f"{where}: {key!r} is gone"
    elif isinstance(committed, list) and isinstance(today, list):
        yield from (f"{where}: {value!r} is gone" for value in committed if value not in today)
    elif committed != today:
        yield f"{where}: {committed!r} became {today!r}"
