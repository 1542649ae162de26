"""The house rules on names and signatures, so that one word means one thing."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from miner_guard.cli.main import COMMANDS
from tests.support.requires import REPO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGES = ("miner_guard",)
_HOOK = REPO / "miner_guard" / "rank" / "guard.py"
"""What a miner calls: keyword-only, and fixed by contract."""

_OVERRIDES = ("http_error_302", "redirect_request")
"""urllib calls these methods with five values and more by position."""


@functools.cache
def _sources() -> list[tuple[Path, ast.Module]]:
    paths = [path for package in _PACKAGES for path in sorted((REPO / package).rglob("*.py"))]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def test_no_class_name_is_defined_twice() -> None:
    """Otherwise only the imports would show which of two classes is meant."""
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


def _is_command(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return path.parent.name == "cli" and node.name in COMMANDS


def test_no_function_takes_more_than_seven_parameters() -> None:
    """A reader should not have to count a call's values. typer turns the parameters of a command
    into its options."""
    long = []
    for place, path, node in _functions():
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        names = {a.arg for a in given} - {"self", "cls"}
        if path != _HOOK and not _is_command(path, node) and len(names) > 7:
            long.append(place)
    assert long == []


def test_no_function_takes_more_than_four_values_by_position() -> None:
    """Two values of the same type could be swapped without causing an error."""
    long = []
    for place, path, node in _functions():
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        overrides = node.name in _OVERRIDES and path.name == "hub.py"
        if len({*names} - {"self", "cls"}) > 4 and not _is_command(path, node) and not overrides:
            long.append(place)
    assert long == []


def _imports() -> dict[str, set[str]]:
    """Every import of one of our modules by another: at the top, in a function, or for type
    checks."""
    modules = {
        ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): tree
        for path, tree in _sources()
    }
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports relatively"
                given = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= {one if one in modules else str(node.module) for one in given}
        graph[name] = (graph[name] & modules.keys()) - {name}
    return graph


def _room(module: str) -> str:
    """The room of a module, such as `miner_guard.cli` or `miner_guard.exits`."""
    return ".".join(module.split(".")[:2])


def test_modules_and_rooms_import_in_no_circle() -> None:
    """The import contracts miss cycles inside a room, in functions, or in type-checking imports."""
    modules, rooms = _imports(), defaultdict(set)
    for name, imported in modules.items():
        rooms[_room(name)] |= {_room(other) for other in imported} - {_room(name)}
    assert len(rooms) <= 24
    for graph in (modules, rooms):
        # Raises CycleError, which names the circle.
        graphlib.TopologicalSorter(graph).prepare()


def test_every_room_has_a_layer() -> None:
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {room for layer in contracts["contracts"][0]["layers"] for room in layer.split(" | ")}
    entries = {"miner_guard", "miner_guard.__main__"}
    assert {_room(name) for name in _imports()} == layers | entries
