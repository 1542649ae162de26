"""A check's result, the snapshot of facts that checks judge, and the expected number of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miner_guard.config import Config


@dataclass(frozen=True)
class Expectation:
    """The number of GPUs that must be present."""

    count: int | None
    """None if no source gives a count and no GPU is known to be present; a CPU run is then not an
    error."""

    origin: str
    """The source of the number, as shown in messages."""

    @property
    def expects_gpus(self) -> bool:
        """True if GPUs are expected, so that a CPU run would be an accident."""
        return bool(self.count)


def expected(
    setting: int | None, last_run: int | None, profile: int | None, present: int | None
) -> Expectation:
    """Return the first of these that is known: the setting, this host's count from the last run,
    the profile's minimum, the GPUs present.

    A count of 0 from the last run is ignored, so adding a GPU raises no event.
    """
    sources = (
        (setting, "[gpu] expect"),
        (last_run or None, "this host's last run"),
        (profile, "the profile"),
        (present or None, "the GPUs present"),
    )
    expectations = (Expectation(count, origin) for count, origin in sources if count is not None)
    return next(expectations, Expectation(None, "no source"))


LEVELS = ("ok", "unknown", "warn", "critical")
"""From harmless to severe."""


@dataclass(frozen=True)
class Check:
    """One row of the doctor's table."""

    check: str
    """Subject and name, such as `gpu.ecc`."""

    level: str
    """One of LEVELS. `unknown` means that the value could not be read and `seen` gives the reason;
    it never counts as ok."""

    seen: str
    limit: str | None = None
    next_step: str | None = None
    """The action to take; None if all is well."""

    gpu: int | None = None
    """NVML index, if the check is about a single GPU."""

    may_clear: bool = False
    """True if waiting may help: a driver may come up late after boot, or an earlier process may
    still be freeing its memory."""


@dataclass(frozen=True)
class Snapshot:
    """The gathered facts. A section is None if it was not read; `unread` gives the reason, unless
    the section was not requested."""

    config: Config
    expectation: Expectation
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    compute: Mapping[str, Any] = field(default_factory=dict)
    """The profile's minimum: `min_gpus`, `min_gpu_memory_gb`, `min_vcpus`, `min_memory_gb`,
    `min_disk_gb`."""

    network: str | None = None
    """Why the profile's network pays nobody; None if it is alive."""

    clone: tuple[str, int] | None = None
    """The version of the miner's clone, and how many commits it is past the profile's."""

    nvml: Mapping[str, Any] | None = None
    """A sample, in the format described in `miner_guard.checks.nvml`."""

    held: tuple[Mapping[str, int], ...] = ()
    """Bytes in use by UUID before the launch, from readings a few seconds apart."""

    torch: Mapping[str, Any] | None = None
    cuda: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Results of the child processes that each used one GPU, by CUDA index: `seconds`, or `error`
    and `answered`."""

    packages: Mapping[str, Any] | None = None
    host: Mapping[str, Any] | None = None
    repo: Mapping[str, Any] | None = None
    """The storage's answer: `checks.environment.examine`."""

    unusable_alerts: Sequence[int] = ()
    """The numbers, from 1, of the alert targets that Apprise cannot send to."""

    missing_extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Missing packages by extra, for extras that the settings require but the guard's interpreter
    lacks."""

    keys_file: str | None = None
    """Why the file named in `[repo] credentials` can't be used; None if it can."""

    unread: Mapping[str, str] = field(default_factory=dict)
    unanswered: frozenset[str] = frozenset()
    """Names in `unread` that missed their deadline: their state is unknown."""

    @property
    def gpu_rows(self) -> list[Mapping[str, Any]]:
        return list(self.nvml["gpus"]) if self.nvml else []


def judged(
    name: str, level: str, reading: str, limit: str | None, *, step: str, **more: Any
) -> Check:
    """A check whose next step `step` is needed only if it is not ok."""
    return Check(name, level, reading, limit, None if level == "ok" else step, **more)


def counts(checks: Iterable[Check]) -> dict[str, int]:
    """The number of checks at each level; every level is present."""
    by_level = Counter(c.level for c in checks)
    return {level: by_level[level] for level in LEVELS}


def gib(size_bytes: float) -> str:
    return f"{size_bytes / 1024**3:.1f} GB"
