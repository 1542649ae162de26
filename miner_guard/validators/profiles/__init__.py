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
from typing import Any, Literal

from miner_guard.config import MinerSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_STATUS = {"dormant": "dormant and scores no uploads", "ended": "gone and pays nobody"}


@dataclass(frozen=True)
class Profile:
    """One subnet's rules as of a given date."""

    name: str
    title: str
    dated: datetime.date
    read_from: str
    """Repository and commit that the numbers come from."""

    path: Path
    status: Literal["alive", "dormant", "ended"] = "alive"
    """Whether the network pays miners."""

    status_as_of: datetime.date | None = None
    status_source: str | None = None
    """What shows the status."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Structured like guard.toml, for `config.loading.load(profile=…)`."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    """Values for `miner_guard.validators.limits.Limits`."""

    compute: Mapping[str, Any] = field(default_factory=dict)
    """Minimum compute: `min_gpus`, `gpus_per_rank`, `min_gpu_memory_gb`, …; only known values."""

    advice: Mapping[str, str] = field(default_factory=dict)
    """By phase: what to do if the miner stays in it for longer than `[hang] phases` allows."""

    patterns: Mapping[str, Any] = field(default_factory=dict)
    """Regular expressions for the miner's log lines, for log-only mode."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each number, by its dotted name."""

    @property
    def judges(self) -> bool:
        """Whether validators of the network judge what a miner publishes."""
        return self.limits.keys() > {"read_from"}

    @property
    def unpaid(self) -> str | None:
        """Why the network pays nobody; None if it is alive."""
        if self.status == "alive":
            return None
        return (
            f"{self.title}: the network is {_STATUS[self.status]} (as of "
            f"{self.status_as_of or self.dated}: {self.status_source})"
        )


def names() -> list[str]:
    """Names of the profiles that ship with the guard."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.toml"))


def load_profile(name_or_path: str, *, checked: bool = False) -> Profile:
    """Load a profile by name (`sn38`) or path. Raises FileNotFoundError, OSError, or ValueError
    naming the defect. One that ships with the guard is only validated if `checked`."""
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
    if checked or path != shipped:
        from miner_guard.validators.profiles.checks import wrong

        for words in wrong(document):
            raise ValueError(f"{path}: {words}")
    limits = {"read_from": document["read_from"], **document.get("limits", {})}
    return Profile(**{**document, "limits": limits, "path": path})


def chosen(miner: MinerSettings) -> str | None:
    """The profile that `[miner] profile` selects, else the one that `attach` selects; None if
    neither selects one."""
    return miner.profile or (None if miner.attach in (None, "auto", "log") else miner.attach)


def profile_of(miner: MinerSettings) -> Profile | None:
    """The chosen profile; None if none is chosen. Raises the same errors as `load_profile`."""
    name = chosen(miner)
    return None if name is None else load_profile(name)
