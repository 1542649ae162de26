"""A subnet as data: settings, rule limits, minimum compute, log patterns; each number with its
source.

Not for ranks: the supervisor reads the TOML and passes the limits on in gate-inputs.json.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miner_guard.config import MinerSettings
from miner_guard.validators.profiles.checks import (
    wrong_compute,
    wrong_limits,
    wrong_patterns,
    wrong_sources,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = ("compute", "settings", "limits", "sources", "patterns")
_WORDS = ("name", "title", "read_from")


@dataclass(frozen=True)
class Profile:
    """One subnet's rules as of a given date."""

    name: str
    title: str
    dated: datetime.date
    read_from: str
    """Repository and commit that the numbers come from."""

    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Structured like guard.toml, for `settings.load(profile=…)`."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    """Values for `miner_guard.validators.limits.Limits`."""

    compute: Mapping[str, Any] = field(default_factory=dict)
    """Minimum compute: `min_gpus`, `gpus_per_rank`, `min_gpu_memory_gb`, …; only known values."""

    patterns: Mapping[str, Any] = field(default_factory=dict)
    """Regular expressions for the miner's log lines, for log-only mode."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each number, by its dotted name."""


def names() -> list[str]:
    """Names of the profiles that ship with the guard."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.toml"))


def load_profile(name_or_path: str) -> Profile:
    """Load a profile by name (`sn38`) or path. Raises FileNotFoundError, OSError, or ValueError
    naming the defect."""
    shipped = Path(__file__).parent / f"{name_or_path}.toml"
    path = (
        shipped
        if shipped.parent == Path(__file__).parent and shipped.is_file()
        else Path(name_or_path).expanduser()
    )
    if not path.is_file():
        raise FileNotFoundError(
            f"no profile {name_or_path!r}; choose one of {', '.join(names())}, or pass a path"
        )
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    return _profile(document, path)


def chosen(miner: MinerSettings) -> str | None:
    """The profile that `[miner] profile` selects, else the one that `attach` selects; None if
    neither selects one."""
    return miner.profile or (None if miner.attach in (None, "auto", "log") else miner.attach)


def limits_of(miner: MinerSettings) -> Mapping[str, Any]:
    """Values for `Limits` from the chosen profile; empty if none is chosen. Raises the same errors
    as `load_profile`."""
    name = chosen(miner)
    return {} if name is None else load_profile(name).limits


def _profile(document: Mapping[str, Any], path: Path) -> Profile:
    if foreign := sorted(set(document) - {*_TABLES, *_WORDS, "dated"}):
        raise ValueError(
            f"{path}: unknown keys: {', '.join(foreign)}; allowed: "
            f"{', '.join((*_WORDS, 'dated', *_TABLES))}"
        )
    if missing := [word for word in (*_WORDS, "dated") if word not in document]:
        raise ValueError(f"{path}: lacks {', '.join(missing)}")
    if not isinstance(document["dated"], datetime.date):
        raise ValueError(f"{path}: dated is {document['dated']!r}; write a date such as 2025-12-23")
    for table in _TABLES:
        if not isinstance(document.get(table, {}), Mapping):
            raise ValueError(f"{path}: {table} is not a table")
    limits = {"read_from": str(document["read_from"]), **document.get("limits", {})}
    for words in (
        *wrong_limits(limits),
        *wrong_compute(document.get("compute", {})),
        *wrong_patterns(document.get("patterns", {})),
        *wrong_sources(document.get("sources", {}), document),
    ):
        raise ValueError(f"{path}: {words}")
    return Profile(
        str(document["name"]),
        str(document["title"]),
        document["dated"],
        str(document["read_from"]),
        path,
        **{**{table: document.get(table, {}) for table in _TABLES}, "limits": limits},
    )
