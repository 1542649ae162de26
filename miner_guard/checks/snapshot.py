"""The health snapshot: one document, and a one-line form of at most 200 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miner_guard.record.status_document import RunState, StatusDocument, StepsStatus, UploadsStatus
from miner_guard.record.words import counted

WIDTH = 200
PREFIX = len("2026-01-02T03:04:05.678Z | INFO | guard | HEALTH ")
"""Length of the console's text before the summary: time, level, source and `HEALTH `."""

_GIB = 1024**3

Part = Mapping[str, Any]


def assemble(
    document: Mapping[str, Any],
    *,
    host: Part | None,
    gpus: Part | None,
    guard: Part,
    unknown: Mapping[str, str],
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
            "pid": status.pid,
            "attempt": status.attempt,
            "restarts": status.restarts,
            "ranks": len(status.rank_processes),
            "outer_step": steps.outer_step,
            "inner_step": steps.inner_step,
            "total_steps": steps.total_steps,
            "loss": steps.loss,
            "step_p50_s": steps.p50_s,
            "step_p95_s": steps.p95_s,
            "last_step_age_s": steps.last_step_age_s,
            "goodput": goodput(steps),
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
        "guard": {**guard, "jobs": document.get("jobs") or None},
        "unknown": dict(unknown),
    }


def goodput(steps: StepsStatus) -> float | None:
    """Share of the run's time spent training, 0-1; None before the first step."""
    return steps.goodput.get("training") if steps.steps else None


def summary(snapshot: Mapping[str, Any]) -> str:
    """The text after `HEALTH `: at most 200 columns, including the console's prefix.

    If it is too long, drops the least important values first.
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
    """Format a figure with its unit; `?` if unknown. A word (`NaN`) stays unchanged."""
    if isinstance(value, str):
        return value
    return "?" if value is None else f"{value:{spec}}{unit}"


def _miner(miner: Part) -> str:
    words = [f"{miner['life'] or miner['state'] or 'unknown'}"]
    if miner.get("health") not in (None, "well"):
        words.append(str(miner["health"]).upper())
    if miner.get("earning") in ("at risk", "no"):
        words.append("EARNING AT RISK" if miner["earning"] == "at risk" else "NOT EARNING")
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
    repo = UploadsStatus.from_json(uploads).repo
    return "repo empty" if repo.empty else f"repo {number(repo.age_s, '.0f', 's')}"


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
