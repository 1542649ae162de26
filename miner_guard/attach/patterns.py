"""Loads the patterns that the guard uses to recognise steps in a training program's output: the
common grammar, and those of a profile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miner_guard.detectors.log_lines import Patterns
from miner_guard.detectors.step_grammar import Grammar, Vocabulary
from miner_guard.validators import profiles

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_COMMON = Path(__file__).with_name("patterns.toml")


@functools.lru_cache(maxsize=1)
def _common() -> Mapping[str, Any]:
    return tomllib.loads(_COMMON.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def grammar() -> Grammar:
    """The step-line grammar with the common vocabulary."""
    common = _common()
    return Grammar(
        Vocabulary(common["names"], common["lines"]["bars"], common["lines"]["not_steps"])
    )


def patterns(profile: str | None, first: Iterable[str] = ()) -> Patterns:
    """The step patterns `first`, then those of `profile` (if any), then the common grammar."""
    tables: list[Mapping[str, Iterable[str]]] = [{"step": tuple(first)}]
    if profile is not None:
        tables.append(profiles.load_profile(profile).patterns)
    tables.append(_common()["patterns"])
    return Patterns.of(*tables, grammar=grammar())
