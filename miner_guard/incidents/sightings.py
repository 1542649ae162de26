"""The sightings that a scanner reports, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union


class Sighting(NamedTuple):
    """A line that shows a label. A tuple, because a log may hold one in every line."""

    label: str
    role: str
    line: int
    """Counts from 1, like an editor."""

    text: str
    rank: int | None
    cause: str = ""
    """The pattern's cause, if it differs from the label's."""

    more: str = ""
    """The following lines, if the message continues there."""

    fix: str = ""
    """Copied from the pattern, as are `restart`, `source` and `least`."""

    restart: str = ""
    source: str = ""
    least: int = 1


@dataclass(frozen=True)
class Retraction:
    """A line that retracts recent sightings: the program recovered from the error, or raised
    another."""

    labels: tuple[str, ...]
    line: int
    within: int | None = 30
    """How many lines it reaches back; None: to the beginning."""

    roles: tuple[str, ...] = ()
    """Retracts only sightings in these roles; in any role if empty."""

    coped: bool = False
    """The program itself reports that it recovered; an exception right after the line contradicts
    that."""


@dataclass(frozen=True)
class Passed:
    """Training continued after a retry or warning with these labels: they do not cause a later
    exit."""

    labels: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Launched:
    """The guard reports that it started the miner; earlier sightings belong to the previous
    launch."""

    line: int


Seen = Union[Sighting, Retraction, Passed, Launched]
