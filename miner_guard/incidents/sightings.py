"""What a scanner reports about the lines of a log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union


class Sighting(NamedTuple):
    """A line that indicates a label. A tuple for speed, since every line of a log may indicate
    one."""

    label: str
    role: str
    line: int
    """Line number, starting at 1."""

    text: str
    rank: int | None
    cause: str = ""
    """The pattern's cause, if it differs from the label's."""

    more: str = ""
    """The rest of the message, if it continues on the following lines."""

    fix: str = ""
    """Copied from the pattern, like `restart`, `source` and `least`."""

    restart: str = ""
    source: str = ""
    least: int = 1


@dataclass(frozen=True)
class Retraction:
    """A line that retracts recent sightings, because the program recovered from the error or
    raised a different one."""

    labels: tuple[str, ...]
    line: int
    within: int | None = 30
    """How many lines back to retract; None means back to the beginning."""

    roles: tuple[str, ...] = ()
    """Roles of the sightings to retract; empty means all roles."""

    coped: bool = False
    """Whether the program itself reports that it recovered. An exception right after this line
    contradicts that."""


@dataclass(frozen=True)
class Passed:
    """Training continued after retries or warnings with these labels, so they did not cause any
    later exit."""

    labels: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Launched:
    """A line in which the guard reports that it started the miner; earlier sightings belong to the
    previous launch."""

    line: int


Seen = Union[Sighting, Retraction, Passed, Launched]
