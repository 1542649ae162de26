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

_OVERRIDES = ("http_error_302", "redirect_request")
"""urllib calls these methods with five values and more by position."""


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


def _functions() -> Iterator[tuple[str, Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path.relative_to(REPO)}:{node.lineno} {node.name}", path, node


def test_no_function_takes_more_than_seven_parameters() -> None:
    """Guards against calls whose values a reader has to count. typer makes options of a command's
    parameters."""
    long = []
    for place, path, node in _functions():
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        names = {a.arg for a in given} - {"self", "cls"}
        if path != _HOOK and "cli" not in path.parts and len(names) > 7:
            long.append(place)
    assert long == []


def test_no_function_takes_more_than_four_values_by_position() -> None:
    """Guards against two values of one type that change places without an error."""
    long = []
    for place, path, node in _functions():
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        is_command = path.parent.name == "cli" and node.name == "command"
        overrides = node.name in _OVERRIDES and path.name == "hub.py"
        if len({*names} - {"self", "cls"}) > 4 and not is_command and not overrides:
            long.append(place)
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
