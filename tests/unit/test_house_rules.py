"""The house's rules on names and signatures, so that one word means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.requires import REPO

_PACKAGES = ("miner_guard", "uploads", "validators")
_HOOK = REPO / "miner_guard" / "rank" / "guard.py"
"""What a miner calls: keyword-only, and fixed by contract."""


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in _PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_no_class_name_is_defined_twice() -> None:
    """Guards against two things of one name, which a reader must tell apart by their imports."""
    places = defaultdict(list)
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(REPO)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_function_takes_more_than_seven_parameters() -> None:
    """Guards against calls whose values a reader has to count. A command's options are its own
    matter."""
    long = []
    for path, tree in _sources():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            arguments = node.args
            names = [
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ]
            if path != _HOOK and "cli" not in path.parts and len({*names} - {"self", "cls"}) > 7:
                long.append(f"{path.relative_to(REPO)}:{node.lineno} {node.name}")
    assert long == []


def test_the_packages_hold_no_layout_by_hand() -> None:
    """`# fmt: skip` only where a table at the level of a module is a table."""
    by_hand = [
        f"{path.relative_to(REPO)}:{number}"
        for path, _ in _sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.rstrip().endswith("# fmt: skip") and line.startswith((" ", "def ", "class "))
    ]
    assert by_hand == []
