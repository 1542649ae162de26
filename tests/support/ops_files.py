"""Reads the files in ops/ for tests."""

from __future__ import annotations

from typing import Any

from tests.support import requires

OPS = requires.REPO / "ops"


def yaml_of(name: str) -> dict[str, Any]:
    """A YAML file in ops/."""
    requires.module("yaml")
    import yaml

    document: dict[str, Any] = yaml.safe_load((OPS / name).read_text(encoding="utf-8"))
    return document
