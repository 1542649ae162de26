"""The events that the package can log, read from its source: every call of `event(…)`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.support import requires


@dataclass(frozen=True)
class Logged:
    """One place in the source that logs an event."""

    name: str
    level: str | None
    """None if a variable holds it."""

    line: str | None
    """The sentence, with `{}` where it has values; None if a function or a variable holds it."""

    where: str


@functools.cache
def events() -> Mapping[str, tuple[Logged, ...]]:
    """The places by event name."""
    places: dict[str, list[Logged]] = {}
    for path in sorted((requires.REPO / "miner_guard").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for each in _of(tree, str(path.relative_to(requires.REPO))):
            places.setdefault(each.name, []).append(each)
    return {name: tuple(each) for name, each in sorted(places.items())}


def _of(tree: ast.AST, where: str) -> Iterator[Logged]:
    assigned = [
        (node.lineno, node.targets[0].id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]

    def value(node: ast.expr) -> ast.expr:
        """What the nearest assignment above gave the variable, if it is one."""
        before = [a for a in assigned if isinstance(node, ast.Name) and a[1] == node.id]
        return max(
            (a for a in before if a[0] < node.lineno), key=lambda a: a[0], default=(0, "", node)
        )[2]

    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "degraded":
            yield Logged("guard_degraded", "warning", "GUARD DEGRADED: {}", where)
        elif node.func.id == "event" and len(node.args) == 3:
            name, level, text = *node.args[:2], value(node.args[2])
            assert isinstance(name, ast.Constant), f"{where}:{node.lineno}: a literal name"
            for choice in (level.body, level.orelse) if isinstance(level, ast.IfExp) else (level,):
                known = choice.value if isinstance(choice, ast.Constant) else None
                yield Logged(str(name.value), known, _text(text), where)


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
    if isinstance(node, ast.BinOp):
        left, right = _text(node.left), _text(node.right)
        return f"{left or '{}'}{right or '{}'}"
    return None
