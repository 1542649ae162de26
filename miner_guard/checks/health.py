"""Samplers of the host and of the guard itself, and the health snapshot: one document, and a
one-line form of at most 200 columns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from miner_guard.record.events import Event, degraded, recovered
from miner_guard.record.status_document import RunState, StatusDocument, UploadsStatus
from miner_guard.record.words import counted, gb, number
from miner_guard.system.clock import Clock, Once
from miner_guard.system.probe import HelperCpu

Read = Callable[[], Mapping[str, Any]]

_NOT_YET = "not read yet"


class Unreadable(Exception):
    """Raised by a sampler that can say why it has no value."""


@dataclass(frozen=True)
class Reading:
    """A sampler's last answer. If the last attempt failed, `value` is None and `reason` says
    why."""

    value: Mapping[str, Any] | None
    reason: str | None


class Samplers:
    """A set of named samplers that the caller's jobs read. One that does not return costs only the
    figures of its job: they are unknown after `patience_s`."""

    def __init__(self, clock: Clock, patience_s: float, reads: Mapping[str, Read]) -> None:
        self._clock, self._patience_s, self._reads = clock, patience_s, dict(reads)
        self._readings = dict.fromkeys(self._reads, Reading(None, _NOT_YET))
        self._since: dict[str, float] = {}
        """When each attempt in progress began (monotonic)."""
        self._bad = Once()
        self._one_at_a_time = threading.Lock()

    def sample(self, *names: str) -> list[Event]:
        """Read these samplers, one after the other; returns new failures and recoveries of all."""
        for name in names:
            self._since[name] = self._clock.monotonic()
            try:
                self._readings[name] = Reading(self._reads[name](), None)
            except Unreadable as error:
                self._readings[name] = Reading(None, str(error))
            except Exception as error:  # noqa: BLE001 - whatever a sampler raises is reported as its reason
                self._readings[name] = Reading(None, f"{type(error).__name__}: {error}")
            del self._since[name]
        with self._one_at_a_time:
            return [change for name in self._reads for change in self._changes(name)]

    def _changes(self, name: str) -> Iterator[Event]:
        reason = self.reading(name).reason
        if reason is None and self._bad.clear(name):
            yield recovered(f"{name} can be read again", sampler=name)
        elif reason not in (None, _NOT_YET) and self._bad.first(name):
            yield degraded(f"{name} can't be read: {reason}", sampler=name, reason=reason)

    def reading(self, name: str) -> Reading:
        """One sampler's last answer, or why there is none."""
        since = self._since.get(name)
        if since is not None and self._clock.monotonic() - since > self._patience_s:
            return Reading(None, f"no answer within {self._patience_s:g} s")
        return self._readings[name]

    def value(self, name: str) -> Mapping[str, Any] | None:
        """One sampler's last answer; None if it is unknown."""
        return self.reading(name).value

    def unknown(self) -> dict[str, str]:
        """For each sampler without an answer, the reason."""
        reasons = {name: self.reading(name).reason for name in self._reads}
        return {name: reason for name, reason in reasons.items() if reason is not None}


CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 reports `no limit` as a number at least this large."""


class HostSampler:
    """Reads CPU, memory and disk separately: a disk that hangs must not hide the memory figures.

    `cpu_pct` covers the time since the last reading. An unreadable source raises OSError,
    ValueError or psutil.Error.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """`folders` maps names to the paths whose free space is measured."""
        self._folders = dict(folders)
        self._cpu: tuple[float, float] | None = None
        self.reads: Mapping[str, Read] = {
            "cpu": self._read_cpu,
            "memory": self._read_memory,
            "disk": self._read_disk,
        }
        """The function that reads each source, by the source's name."""

    def _read_cpu(self) -> Mapping[str, Any]:
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        before, self._cpu = self._cpu, (busy, total)
        share = None
        if before is not None and total > before[1]:
            share = max(0.0, 100 * (busy - before[0]) / (total - before[1]))
        return {"cpu_pct": share}

    def _read_memory(self) -> Mapping[str, Any]:
        machine = psutil.virtual_memory()
        limit, used, kills = read_cgroup_memory()
        contained = limit is not None and limit < machine.total
        return {
            "memory_limit_bytes": limit if contained else machine.total,
            "memory_used_bytes": used if contained else machine.total - machine.available,
            "memory_limit_by": "cgroup" if contained else "machine",
            "oom_kills": kills,
        }

    def _read_disk(self) -> Mapping[str, Any]:
        folders = self._folders.items()
        free = {name: psutil.disk_usage(str(existing(path))).free for name, path in folders}
        least = min(free.values(), default=None)
        return {"disk_free_bytes": least, "disk_free_by_folder_bytes": free}


HOST_FIGURES = (
    "cpu_pct",
    *("memory_limit_bytes", "memory_used_bytes", "memory_limit_by", "oom_kills"),
    *("disk_free_bytes", "disk_free_by_folder_bytes"),
)
"""The names of all the host's figures."""


def host_figures(readings: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Combine the samplers' answers into the host's figures. A figure without an answer is None;
    the result is None if no sampler answered."""
    figures: dict[str, Any] = {}
    for reading in readings:
        figures |= reading or {}
    return {**dict.fromkeys(HOST_FIGURES), **figures} if figures else None


def existing(path: Path) -> Path:
    """`path`, or its nearest existing parent: the state directory may not exist yet."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def read_cgroup_memory(
    proc: Path = Path("/proc"), cgroup: Path = CGROUP
) -> tuple[int | None, int | None, int | None]:
    """This process's cgroup: its memory limit, its usage excluding reclaimable cache, and its
    out-of-memory kills; None for any that is unknown."""
    folder = _cgroup_folder(proc, cgroup)
    if folder is None:
        return None, None, None
    if (folder / "memory.max").exists():
        used, limit = "memory.current", "memory.max"
        cache, events = "inactive_file", "memory.events"
    else:
        used, limit = "memory.usage_in_bytes", "memory.limit_in_bytes"
        cache, events = "total_inactive_file", "memory.oom_control"
    in_use, cached = _number(folder / used), _entry(folder / "memory.stat", cache)
    # Exclude the cache: with it, a healthy cgroup may be at its limit.
    uncached = None if in_use is None or cached is None else in_use - cached
    return _least_limit(folder, cgroup, limit), uncached, _entry(folder / events, "oom_kill")


def oom_kills() -> int | None:
    """Out-of-memory kills so far: the sum of the cgroup's counter and the kernel's (which covers
    the whole machine). None if neither can be read. Only an increase in the sum is meaningful."""
    counters = []
    with contextlib.suppress(OSError, ValueError):
        counters.append(read_cgroup_memory()[2])
    with contextlib.suppress(OSError, ValueError):
        counters.append(_entry(Path("/proc/vmstat"), "oom_kill"))
    readable = [count for count in counters if count is not None]
    return sum(readable) if readable else None


def _cgroup_folder(proc: Path, cgroup: Path) -> Path | None:
    """This process's cgroup folder, from the line `0::/path` (version 2) or the `memory`
    controller's line (version 1); None if not found."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        root = cgroup if number == "0" and not controllers else cgroup / "memory"
        if (number == "0" and not controllers) or "memory" in controllers.split(","):
            # Inside a container the path may be the host's, while the mount shows the container's
            # cgroup as its root: try both.
            for folder in (root / path.lstrip("/"), root):
                if (folder / "memory.max").exists() or (folder / "memory.limit_in_bytes").exists():
                    return folder
    return None


def _least_limit(folder: Path, top: Path, name: str) -> int | None:
    """Return the lowest limit set by a folder or any of its parents."""
    limits = []
    while True:
        limit = _number(folder / name)
        if limit is not None and limit < _UNLIMITED:
            limits.append(limit)
        if folder == top or folder.parent == folder:
            return min(limits, default=None)
        folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _entry(path: Path, key: str) -> int | None:
    try:
        rows = dict(row.split(None, 1) for row in path.read_text().splitlines() if " " in row)
    except OSError:
        return None
    return int(rows[key]) if key in rows and rows[key].strip().isdigit() else None


OWN_FIGURES = ("cpu_pct", "cpu_s", "helpers_cpu_s", "memory_bytes")


class OwnSampler:
    """Samples the guard; CPU covers the time since the last sample, as a percentage of one core."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._helpers = HelperCpu()
        self._before: tuple[float, float] | None = None

    def sample(self) -> dict[str, Any]:
        """`cpu_pct` and `cpu_s` of the supervisor and its helpers (the HTTP port, the GPU sampler,
        senders, probes, including those that have exited); `helpers_cpu_s`: CPU seconds of
        the helpers only; `memory_bytes` of the supervisor. Raises OSError."""
        helpers_s = self._helpers.read()
        now, used = time.monotonic(), time.process_time() + helpers_s
        before, self._before = self._before, (now, used)
        share = 100 * (used - before[1]) / (now - before[0]) if before else None
        resident = self._process.memory_info().rss
        return dict(zip(OWN_FIGURES, (share, used, helpers_s, resident), strict=True))


_WIDTH = 200 - len("2026-01-02T03:04:05.678Z | INFO | guard | HEALTH ")
"""Room for the summary in a console line of 200 columns."""

Part = Mapping[str, Any]


def assemble(
    document: Part, *, host: Part | None, gpus: Part | None, guard: Part, unknown: Mapping[str, str]
) -> dict[str, Any]:
    """Assemble the snapshot. Unknown values are null, with the reason for each under `unknown`, by
    name."""
    status = StatusDocument.from_json(document)
    steps, costs, state = status.steps, status.costs, status.verdict or RunState()
    return {
        "miner": {
            "state": status.state,
            "life": state.life,
            "health": state.health,
            "earning": state.earning,
            "restarts": status.restarts,
            "outer_step": steps.outer_step,
            "inner_step": steps.inner_step,
            "loss": steps.loss,
            "step_p50_s": steps.p50_s,
            "goodput": steps.goodput.get("training") if steps.steps else None,
        },
        "ranks": {
            rank: {"work_s": row.work_s, "gpu_mem_gb": row.gpu_mem_gb}
            for rank, row in steps.per_rank.items()
        },
        "gpus": gpus,
        "host": host,
        "uploads": document.get("uploads") or None,
        "chain": document.get("chain") or None,
        "costs": {
            key: getattr(costs, key) for key in ("share_pct", "budget_pct", "guard_blocking_pct")
        },
        "guard": dict(guard),
        "unknown": dict(unknown),
    }


def summary(snapshot: Part) -> str:
    """The text after `HEALTH `. If it is too long for the console, drops the least important values
    first."""
    words = [
        _miner(snapshot["miner"]),
        _gpus(snapshot["gpus"]),
        _host(snapshot["host"]),
        _uploads(snapshot["uploads"]),
        _guard(snapshot["guard"], snapshot["costs"]["share_pct"]),
        _chain(snapshot["chain"] or {}),
    ]
    words = [word for word in words if word]
    while len(" | ".join(words)) > _WIDTH and len(words) > 1:
        words.pop()
    return " | ".join(words)[:_WIDTH]


def _miner(miner: Part) -> str:
    words = [str(miner["life"] or miner["state"] or "unknown")]
    if miner["health"] not in (None, "well"):
        words.append(str(miner["health"]).upper())
    if miner["earning"] in ("at risk", "no"):
        words.append("EARNING AT RISK" if miner["earning"] == "at risk" else "NOT EARNING")
    if miner["inner_step"] is not None:
        words.append(f"step {number(miner['outer_step'])}.{miner['inner_step']}")
        words.append(f"loss {number(miner['loss'], '.2f')}")
        words.append(f"p50 {number(miner['step_p50_s'], '.3g', 's')}")
    if miner["goodput"] is not None:
        words.append(f"goodput {100 * miner['goodput']:.0f}%")
    if miner["restarts"]:
        words.append(counted(miner["restarts"], "restart"))
    return " ".join(words)


def _gpus(gpus: Part | None) -> str:
    """The least memory and utilization, and the highest temperature."""
    rows: Sequence[Part] = (gpus or {}).get("gpus") or ()
    if not rows:
        return "gpu none" if (gpus or {}).get("state") == "absent" else "gpu ?"
    used, busy, heat = (
        [row[name] for row in rows if row.get(name) is not None]
        for name in ("memory_used_bytes", "utilization_ratio", "temperature_c")
    )
    bad = sum(row.get("state") not in ("ok", None) for row in rows)
    words = [f"gpu {len(rows)}x", number(gb(min(used, default=None)), ".1f", "G")]
    words.append(number(100 * min(busy) if busy else None, ".0f", "%"))
    words.append(number(max(heat, default=None), ".0f", "C"))
    return " ".join([*words, f"{bad} BAD"] if bad else words)


def _host(host: Part | None) -> str:
    if host is None:
        return "host ?"
    used, limit = gb(host["memory_used_bytes"]), gb(host["memory_limit_bytes"])
    memory = f"{used:.2g}/{limit:.0f}G" if used is not None and limit else "?"
    disk = number(gb(host["disk_free_bytes"]), ".0f", "G")
    return f"cpu {number(host['cpu_pct'], '.0f', '%')} mem {memory} disk {disk}"


def _uploads(uploads: Part | None) -> str:
    if uploads is None:
        return ""
    repo = UploadsStatus.from_json(uploads).repo
    return "repo empty" if repo.empty else f"repo {number(repo.age_s, '.0f', 's')}"


def _chain(chain: Part) -> str:
    return "" if chain.get("block") is None else f"block {number(chain['block'])}"


def _guard(guard: Part, share_pct: float | None) -> str:
    resident = guard["memory_bytes"]
    return (
        f"guard {number(guard['cpu_pct'], '.1f', '%')} "
        f"{number(resident and resident / 1024**2, '.0f', 'M')} mon {number(share_pct, '.1f', '%')}"
    )
