"""The health snapshot: one document, and a one-line form of at most 200 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miner_guard.eventlog.catalog import counted

WIDTH = 200
PREFIX = len("2026-01-02T03:04:05.678Z | INFO | guard | HEALTH ")
"""The console's text before the words: time, level, source and `HEALTH `."""

_GIB = 1024**3
_ALARMING = ("not earning", "degraded")
"""Verdicts that the line names; the others say no more than the miner's state."""

Part = Mapping[str, Any]


def assemble(
    status: Mapping[str, Any],
    *,
    host: Part | None,
    gpus: Part | None,
    guard: Part,
    unknown: Mapping[str, str],
) -> dict[str, Any]:
    """The document. Unknown values are null, with their reason under `unknown` by name."""
    steps, uploads = part(status, "steps"), part(status, "uploads")
    return {
        "miner": {
            "state": status.get("state"),
            "verdict": part(status, "verdict").get("state"),
            "pid": status.get("miner_pid"),
            "attempt": status.get("attempt"),
            "restarts": status.get("restarts"),
            "ranks": len(status.get("rank_processes") or ()),
            "outer_step": steps.get("outer_step"),
            "inner_step": steps.get("inner_step"),
            "total_steps": steps.get("total_steps"),
            "loss": steps.get("loss"),
            "step_p50_s": steps.get("p50_s"),
            "step_p95_s": steps.get("p95_s"),
            "last_step_age_s": steps.get("last_step_age_s"),
            "goodput": goodput(steps),
        },
        "ranks": {
            rank: {"work_s": own_work_s(row), "gpu_mem_gb": row.get("gpu_mem_gb")}
            for rank, row in part(steps, "per_rank").items()
        },
        "gpus": gpus,
        "host": host,
        "uploads": dict(uploads) or None,
        "chain": dict(part(status, "chain")) or None,
        "costs": {
            key: part(status, "costs").get(key)
            for key in ("share_pct", "budget_pct", "guard_blocking_pct")
        },
        "guard": {**guard, "jobs": dict(part(status, "jobs")) or None},
        "unknown": dict(unknown),
    }


def part(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One section of a status or of a section, empty where it is missing."""
    value = document.get(name)
    return value if isinstance(value, Mapping) else {}


def own_work_s(row: Part) -> float | None:
    """Seconds of a rank's last step in which it worked itself, without its wait for the others:
    collectives give all ranks the same step time. `row`: of `steps.per_rank` in the status."""
    seconds, phases = row.get("step_time_s"), part(row, "phases_s")
    if seconds is None:
        return None
    waited = sum(phases.get(name) or 0.0 for name in ("collective", "allreduce"))
    return float(max(0.0, seconds - waited))


def goodput(steps: Mapping[str, Any]) -> float | None:
    """Share of the run's time spent training, 0-1; None before the first step."""
    shares = steps.get("goodput")
    if not isinstance(shares, Mapping) or not steps.get("steps"):
        return None
    value = shares.get("training")
    return float(value) if isinstance(value, (int, float)) else None


def summary(snapshot: Mapping[str, Any]) -> str:
    """The text after `HEALTH `; with the console's prefix at most 200 columns.

    Drops the least important values first where one is unexpectedly long.
    """
    words = [
        _miner(snapshot["miner"]),
        _gpus(snapshot["gpus"]),
        _host(snapshot["host"]),
        _uploads(snapshot["uploads"]),
    ]
    words = [word for word in (*words, _guard(snapshot), _chain(snapshot["chain"])) if word]
    while len(" | ".join(words)) > WIDTH - PREFIX and len(words) > 1:
        words.pop()
    return " | ".join(words)[: WIDTH - PREFIX]


def number(value: Any, spec: str = "", unit: str = "") -> str:
    """A figure with its unit, `?` where unknown; a word (`NaN`) unchanged."""
    if isinstance(value, str):
        return value
    return "?" if value is None else f"{value:{spec}}{unit}"


def _miner(miner: Part) -> str:
    words = [f"{miner['state'] or 'unknown'}"]
    if miner.get("verdict") in _ALARMING:
        # A miner that hangs is "running" to the operating system, and to no one else.
        words.append(str(miner["verdict"]).upper())
    if miner["inner_step"] is not None:
        words.append(f"step {number(miner['outer_step'])}.{miner['inner_step']}")
        words.append(f"loss {number(miner['loss'], '.2f')}")
        words.append(f"p50 {number(miner['step_p50_s'], '.3g', 's')}")
    if miner["goodput"] is not None:
        words.append(f"goodput {100 * miner['goodput']:.0f}%")
    if miner["restarts"]:
        words.append(f"{counted(miner['restarts'], 'restart')}")
    return " ".join(words)


def _gpus(gpus: Part | None) -> str:
    rows: Sequence[Part] = () if gpus is None else gpus.get("gpus") or ()
    if not rows:
        return "gpu none" if gpus is not None and gpus.get("state") == "absent" else "gpu ?"
    used = [row.get("memory_used_bytes") for row in rows]
    busy = [row["utilization_ratio"] for row in rows if row.get("utilization_ratio") is not None]
    hottest = max(
        (row["temperature_c"] for row in rows if row.get("temperature_c") is not None), default=None
    )
    bad = sum(1 for row in rows if row.get("state") not in ("ok", None))
    known = [value for value in used if value is not None]
    words = [f"gpu {len(rows)}x", number(min(known) / _GIB if known else None, ".1f", "G")]
    words.append(number(100 * min(busy) if busy else None, ".0f", "%"))
    words.append(number(hottest, ".0f", "C"))
    return " ".join([*words, f"{bad} BAD"] if bad else words)


def _host(host: Part | None) -> str:
    if host is None:
        return "host ?"
    used, limit = host["memory_used_bytes"], host["memory_limit_bytes"]
    memory = "?" if used is None or not limit else f"{used / _GIB:.2g}/{limit / _GIB:.0f}G"
    disk = host["disk_free_bytes"]
    return (
        f"cpu {number(host['cpu_pct'], '.0f', '%')} mem {memory} disk "
        f"{number(disk and disk / _GIB, '.0f', 'G')}"
    )


def _uploads(uploads: Part | None) -> str:
    if uploads is None:
        return ""
    repo = part(uploads, "repo")
    return "repo empty" if repo.get("empty") else f"repo {number(repo.get('age_s'), '.0f', 's')}"


def _chain(chain: Part | None) -> str:
    return f"block {number(chain.get('block'))}" if chain and chain.get("block") is not None else ""


def _guard(snapshot: Mapping[str, Any]) -> str:
    guard, share = snapshot["guard"], snapshot["costs"]["share_pct"]
    resident = guard["memory_bytes"]
    cpu = number(guard["cpu_pct"], ".1f", "%")
    return (
        f"guard {cpu} {number(resident and resident / 1024**2, '.0f', 'M')} mon "
        f"{number(share, '.1f', '%')}"
    )
