"""The ends of the version ranges that pyproject.toml promises, as constraints for pip: `python -m
tests.support.version_bounds lowest|newest`.

`lowest` pins every package that the guard or an extra needs, and the trainers that it hooks, to the
lowest version allowed; the other tools of `dev` are not pinned. `newest` lets all of them float.
Both keep the exact pins of constraints.txt: one torch for everybody.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain

from packaging.requirements import Requirement
from packaging.version import Version

from miner_guard.config import read_toml
from tests.support import requires

ENDS = ("lowest", "newest")
_TOOLS = {"dev", "demo"}
"""Extras that list other extras, or packages that only the tests need."""
_HOOKED = {"transformers", "accelerate", "lightning"}
"""Packages of `dev` that `--attach auto` hooks: users bring them."""


def constraints(end: str) -> list[str]:
    """One line for pip's `--constraint` for each package that this end of the bounds pins."""
    pinned = _pins()
    if end == "newest":
        return [str(pin) for pin in pinned]
    named = {pin.name for pin in pinned}
    lowest = (f"{need.name}=={_lowest(need)}" for need in promised() if need.name not in named)
    return [*map(str, pinned), *sorted(set(lowest))]


def promised() -> Iterator[Requirement]:
    """The requirements of the guard, its extras and its hooks that apply in this environment."""
    project = read_toml(requires.REPO / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    lists = [needs for extra, needs in extras.items() if extra not in _TOOLS]
    for need in map(Requirement, chain(project["dependencies"], *lists)):
        if need.marker is None or need.marker.evaluate():
            yield need
    yield from (need for need in map(Requirement, extras["dev"]) if need.name in _HOOKED)


def _lowest(need: Requirement) -> Version:
    """The lower bound of a requirement. Raises ValueError if it has none."""
    bounds = [Version(each.version) for each in need.specifier if each.operator in (">=", "==")]
    if len(bounds) != 1:
        raise ValueError(f"{need} has no lower bound")
    return bounds[0]


def _pins() -> list[Requirement]:
    text = (requires.REPO / "constraints.txt").read_text(encoding="utf-8")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    needs = [Requirement(line) for line in lines if line]
    return [need for need in needs if any(each.operator == "==" for each in need.specifier)]


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in constraints(sys.argv[1]))
