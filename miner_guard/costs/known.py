"""Source 000's known operations: how long a call usually takes, how often it runs, and when to
enable it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miner_guard.config.loading import read_toml


@dataclass(frozen=True)
class KnownOperation:
    """One operation of source 000's cost table or decision framework."""

    name: str
    advice: str
    """When to enable it, in source 000's words: `ALWAYS SAFE`, for example."""

    why: str
    call_s: Sequence[float] | None = None
    """Usual range of seconds per call; None if source 000 gives none."""

    every_steps: int | None = None
    every_s: float | None = None
    aliases: Sequence[str] = ()


@functools.cache
def operations() -> tuple[KnownOperation, ...]:
    """Return all known operations: the rows of known.toml."""
    rows = read_toml(Path(__file__).with_name("known.toml"))["operation"]
    return tuple(KnownOperation(**row) for row in rows)


def known(operation: str) -> KnownOperation | None:
    """Find a known operation by name or alias, written in any style (`evolution_snapshot`,
    `EvolutionSnapshot`); None if there is no match."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", operation)
    plain = re.sub(r"[^a-z0-9]+", " ", spaced.lower()).strip()
    return next((row for row in operations() if plain == row.name or plain in row.aliases), None)
