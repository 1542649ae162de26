"""The lines of the console and of guard.jsonl, and the sentences that both the guard and a rank
without a guard write. Standard library only, so that commands that read logs start quickly."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from miner_guard.record.events import Event, event
from miner_guard.record.words import counted, or_unknown, visible
from miner_guard.state_dir import finite


def inner_step(
    figures: Mapping[str, Any],
    loss: Mapping[str, Any] | None = None,
    *,
    miner_prints_steps: bool = False,
) -> str:
    """Source 004's step line. If the miner prints such lines itself, this line has only the fields
    missing from them, so that `grep "Outer Step:"` shows each step once. `loss` says how the loss
    differs from the one that the trainer prints."""
    seconds, memory = figures["step_time_s"], figures["gpu_mem_gb"]
    measured = (
        f" | Step Time: {'unknown' if seconds is None else f'{seconds:.1f}s'}"
        f" | GPU Mem: {'unknown' if memory is None else f'{memory:.2f}GB'}"
    )
    if miner_prints_steps:
        return f"Inner Step: {or_unknown(figures['inner_step'])}{measured}"
    return (
        f"Outer Step: {or_unknown(figures['outer_step'])} | "
        f"Inner Step: {or_unknown(figures['inner_step'])} | "
        f"LR: {or_unknown(figures['lr'], '.8f')} | Loss: "
        f"{or_unknown(figures['loss'], '.2f')}{_loss_remark(loss or {})}{measured}"
    )


def _loss_remark(loss: Mapping[str, Any]) -> str:
    step = loss.get("loss_step")
    remarks = [] if step is None else [f"of step {step}"]
    remarks += ["sum of the losses passed to backward"] if loss.get("loss_summed") else []
    return f" ({', '.join(remarks)})" if remarks else ""


def upload_decided(
    level: str,
    fields: Mapping[str, Any],
    left_out: int | None = None,
    *,
    allowed: bool,
    rank: int | None = None,
) -> Event:
    """The gate's answer, and who demands what, if it is not the validators. A repeated block is
    reported at most once every five minutes, so its line counts the blocks left out since the
    previous one."""
    reason = fields["reason"]
    if allowed:
        text = f"UPLOAD ALLOWED: {reason}"
        return event("upload_allowed", level, text, rank=rank, **fields, left_out=left_out)
    reason += f" ({note})" if (note := fields.get("note")) else ""
    more = f" (asked {counted(left_out, 'more time')} since the last line)" if left_out else ""
    text = f"UPLOAD BLOCKED: {reason}{more}"
    return event("upload_blocked", level, text, rank=rank, **fields, left_out=left_out)


def console_line(record: Mapping[str, Any], *, emoji: bool) -> str:
    """Format a record as `2026-01-02T03:04:05.678Z | WARNING | Rank 2 | ⚠️  SLOW STEP: …`. If the
    message is a block, its other lines follow unchanged."""
    who = "guard" if record.get("rank") is None else f"Rank {record['rank']}"
    mark = f"{_mark(record)} ".lstrip() if emoji else ""
    # Write "CRITICAL ERROR", so that `grep -i "error"` finds critical lines too.
    level = "CRITICAL ERROR" if record["level"] == "critical" else str(record["level"]).upper()
    stamp = str(record["ts"])
    head, _, rest = visible(str(record["msg"])).partition("\n")
    if head.startswith("====") and rest:
        # A block from a source document opens with a rule; put the emoji in front of its title.
        title, _, body = rest.partition("\n")
        return f"{head}\n{mark}{title}\n{body}"
    text = f"{stamp[:23]}Z | {level} | {who} | {mark}{head}"
    return f"{text}\n{rest}" if rest else text


_MARKS = {
    **dict.fromkeys(("guard_started", "guard_stopped"), "🛡️ "),
    **dict.fromkeys(("gpu_diagnostics", "preflight", "no_step_yet"), "🔍"),
    **dict.fromkeys(("fast_log", "timing_breakdown"), "⏱️ "),
    **dict.fromkeys(("upload_unverified", "checkpoint"), "💾"),
    **dict.fromkeys(("upload_allowed", "upload_succeeded", "audit_passed"), "✅"),
    "miner_finished": "✅",
    **dict.fromkeys(("straggler", "network_unreachable"), "✅"),
    "miner_started": "🚀",
}
"""The emoji of events at level info; those of the other levels depend on the level alone."""


def _mark(record: Mapping[str, Any]) -> str:
    name, level = str(record["event"]), str(record["level"])
    if level in ("error", "critical"):
        return "❌"
    if level == "warning":
        return "⚠️ "
    return "✅" if name.endswith(("_recovered", "_cleared", "_relaxed")) else _MARKS.get(name, "")


def json_line(record: Mapping[str, Any], default: Callable[[Any], Any] = str) -> str:
    """Format the record as one line of JSON. Non-finite numbers become null; `default` converts
    values that JSON cannot express."""
    return visible(
        json.dumps(finite(record), ensure_ascii=False, default=default, separators=(", ", ": "))
    )
