"""What a scanner sees in a log, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class Sighting:
    """A line that shows a label."""

    label: str
    role: str
    line: int
    """From 1, as an editor counts."""

    text: str
    rank: int | None
    cause: str = ""
    """Of the pattern, where it says something else than the label."""

    more: str = ""
    """The lines after it, where the message continues there."""

    fix: str = ""
    """Of the pattern, like `restart`, `source` and `least`."""

    restart: str = ""
    source: str = ""
    least: int = 1


@dataclass(frozen=True)
class Retraction:
    """A line that takes back what was seen just before: the program coped with it, or raised
    something else."""

    labels: tuple[str, ...]
    line: int
    within: int | None = 30
    """Lines that it reaches back; None: to the beginning."""

    roles: tuple[str, ...] = ()
    """Only sightings in these roles; in any, where none exists."""


@dataclass(frozen=True)
class Passed:
    """Training continued after these labels were tried again or warned of: whatever ends it later,
    they don't."""

    labels: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Launched:
    """The guard says that it started the miner: a new story begins."""

    line: int


Seen = Union[Sighting, Retraction, Passed, Launched]
