"""The sentences that both the guard and a rank without a guard write: source 004's step lines and
the gate's answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miner_guard.record.events import Event, event
from miner_guard.record.words import counted, known


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
        return f"Inner Step: {known(figures['inner_step'])}{measured}"
    return (
        f"Outer Step: {known(figures['outer_step'])} | Inner Step: {known(figures['inner_step'])}"
        f" | LR: {known(figures['lr'], '.8f')} | Loss: "
        f"{known(figures['loss'], '.2f')}{_loss_remark(loss or {})}{measured}"
    )


def _loss_remark(loss: Mapping[str, Any]) -> str:
    step = loss.get("loss_step")
    remarks = [] if step is None else [f"of step {step}"]
    remarks += ["sum of the losses passed to backward"] if loss.get("loss_summed") else []
    return f" ({', '.join(remarks)})" if remarks else ""


def loss_nan(step: int | None, examples: tuple[int, int] | None = None) -> str:
    """Source 003's line, with the indices of the step's examples if the batch size is known."""
    which = f" (examples {examples[0]}-{examples[1]})" if examples else ""
    return f"Loss is NaN or Inf at step {step}{which}"


def upload_decided(
    level: str,
    fields: Mapping[str, Any],
    left_out: int | None = None,
    *,
    allowed: bool,
    rank: int | None = None,
) -> Event:
    """The gate's answer. A repeated block is reported at most once every five minutes, so its line
    counts the blocks left out since the previous one."""
    reason = fields["reason"]
    if allowed:
        text = f"UPLOAD ALLOWED: {reason}"
        return event("upload_allowed", level, text, rank=rank, **fields, left_out=left_out)
    more = f" (asked {counted(left_out, 'more time')} since the last line)" if left_out else ""
    text = f"UPLOAD BLOCKED: {reason}{more}"
    return event("upload_blocked", level, text, rank=rank, **fields, left_out=left_out)
