"""The repo and chain settings of a state directory's guard, for commands that run without its
guard.toml.

Contains the locations of data and keys, but no keys: neither section can hold any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.config import ChainSettings, Config, GateSettings, RepoSettings
from miner_guard.state_dir import StateDir, read_json, write_json
from miner_guard.validators.profiles import limits_of

_Section = TypeVar("_Section", RepoSettings, ChainSettings, GateSettings)


@dataclasses.dataclass(frozen=True)
class Watched:
    """The sections that an audit needs."""

    repo: RepoSettings
    chain: ChainSettings
    gate: GateSettings
    limits: Mapping[str, Any]
    """The profile's `[limits]`, which the rules read."""


def write(state: StateDir, config: Config) -> None:
    """Save what this guard watches, with absolute paths. Raises OSError."""
    repo = config.repo
    keys = repo.credentials_file or (".env" if repo.credentials == "dotenv" else None)
    repo = dataclasses.replace(repo, path=_absolute(repo.path), credentials_file=_absolute(keys))
    document = {
        "repo": dataclasses.asdict(repo),
        "chain": dataclasses.asdict(config.chain),
        "gate": dataclasses.asdict(config.gate),
        "limits": dict(limits_of(config.miner)),
    }
    write_json(state.watched, document)


def read(state: StateDir) -> Watched | None:
    """The settings that this state directory's guard uses or last used; None if the file is missing
    or incomplete."""
    document = read_json(state.watched)
    if not isinstance(document, Mapping):
        return None
    try:
        return Watched(
            _section(RepoSettings, document["repo"]),
            _section(ChainSettings, document["chain"]),
            _section(GateSettings, document["gate"]),
            dict(document["limits"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _section(kind: type[_Section], table: Any) -> _Section:
    return kind(**{f.name: table[f.name] for f in dataclasses.fields(kind) if f.name in table})
