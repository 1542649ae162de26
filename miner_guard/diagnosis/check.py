"""What one startup check answers, and what it looks at. Plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from miner_guard.config import Config
from miner_guard.diagnosis.expectation import Expectation

LEVELS = ("ok", "unknown", "warn", "critical")
"""From harmless to hard."""


@dataclass(frozen=True)
class Check:
    """One row of the doctor's table."""

    check: str
    """Subject and name, such as `gpu.ecc`."""

    level: str
    """One of LEVELS. `unknown`: it could not be read, `seen` says why; never taken for ok."""

    seen: str
    limit: str | None = None
    next_step: str | None = None
    """What to do; None where all is well."""

    gpu: int | None = None
    """NVML index, where it is about one GPU."""

    may_mend: bool = False
    """Waiting may help: a driver is late after boot, a predecessor still lets go of its memory."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Snapshot:
    """What was gathered. A section that is None was not read; `unread` says why, or it was not
    asked for."""

    config: Config
    expectation: Expectation
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    compute: Mapping[str, Any] = field(default_factory=dict)
    """The profile's minimum: `min_gpus`, `min_gpu_memory_gb`, `min_vcpus`, `min_memory_gb`,
    `min_disk_gb`."""

    nvml: Mapping[str, Any] | None = None
    """A sample as `miner_guard.health.nvml` describes it."""

    held: tuple[Mapping[str, int], ...] = ()
    """Used bytes by UUID before the launch: readings some seconds apart."""

    torch: Mapping[str, Any] | None = None
    cuda: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By CUDA index what a child that used that GPU found: `seconds`, or `error`, `answered`."""

    packages: Mapping[str, Any] | None = None
    host: Mapping[str, Any] | None = None
    clock: Mapping[str, Any] | None = None
    repo: Mapping[str, Any] | None = None
    deep: Mapping[str, Any] | None = None
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Extras that the settings ask for and that the guard's own interpreter lacks: name to missing
    packages."""

    keys_file: str | None = None
    """Why the file of `[repo] credentials` can't be used."""

    unread: Mapping[str, str] = field(default_factory=dict)
    unanswered: frozenset[str] = frozenset()
    """Of `unread` what missed its deadline: nothing is known of it, good or bad."""

    @property
    def gpu_rows(self) -> list[Mapping[str, Any]]:
        return list(self.nvml["gpus"]) if self.nvml else []


def counts(checks: Iterable[Check]) -> dict[str, int]:
    """How many of each level; all levels are there."""
    seen = Counter(c.level for c in checks)
    return {level: seen[level] for level in LEVELS}


def gib(size_bytes: float) -> str:
    return f"{size_bytes / 1024**3:.1f} GB"
