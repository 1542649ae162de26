"""Log line patterns of training programs: a profile's, then the common ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from miner_guard.detectors.log_lines import Patterns
from validators import profiles

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_COMMON = Path(__file__).with_name("patterns.toml")


def patterns(profile: str | None, first: Iterable[str] = ()) -> Patterns:
    """The patterns of `profile`, if given, then the common ones. `first`: step patterns that
    precede both."""
    tables: list[Mapping[str, Iterable[str]]] = [{"step": tuple(first)}]
    if profile is not None:
        tables.append(profiles.load_profile(profile).patterns)
    tables.append(tomllib.loads(_COMMON.read_text(encoding="utf-8")))
    return Patterns.of(*tables)
