"""The next step for each condition: what to do, with commands in backticks. Pure.

A step names what the reader would otherwise have to look up: the path, the GPU, the command that
starts the guard again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from miner_guard.detectors.verdict_memory import Memory
from miner_guard.eventlog.status_document import StatusDocument

Action = Callable[[StatusDocument, Memory], str]
"""Returns the next step; empty if there is nothing to do."""


def always(text: str) -> Action:
    """Return an action with the same text in every state."""
    return lambda status, memory: text


def after_crash_loop(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to apply the last incident's fix and then start the guard."""
    failures = "`miner-guard logs --event incident`"
    incident = memory.incident or {}
    if not incident.get("fix"):
        return f"see each failure with {failures}, fix it, then start the guard: {_start(status)}"
    fix = str(incident["fix"]).rstrip(".")
    return f"{fix}. Then start the guard: {_start(status)}. To see each failure: {failures}"


def start_again(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to start the guard with the same command as before."""
    return f"start it again: {_start(status)}"


def restore(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to go back to the last checkpoint from before the loss became NaN."""
    saved = memory.checkpoint
    if saved is None:
        which = "a checkpoint from before the NaN (the miner reported none to the guard)"
    else:
        which = f"the last checkpoint from before the NaN, `{saved.get('path')}`"
    return f"`miner-guard ctl pause`, restore {which}, then `miner-guard ctl resume`"


def free_space(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to free space on the disk that holds the state directory."""
    path = shlex.quote(status.state_dir) if status.state_dir else "."
    return (
        f"free up space on the disk that holds {status.state_dir or 'the state directory'} "
        f"(`df -h {path}`); the guard then resumes writing on its own"
    )


def satisfy_rule(status: StatusDocument, memory: Memory) -> str:
    """Pass on the advice of the rule that blocks the upload."""
    decision = status.uploads.decision
    _, advice = split_advice(decision.reason if decision else None)
    rules = "`miner-guard logs --event upload_blocked -n 1 --json`"
    return (
        f"{advice}; to see each rule and its limit: {rules}"
        if advice
        else f"see each rule: {rules}"
    )


def split_advice(reason: str | None) -> tuple[str, str]:
    """The problem and the advice in a validator rule's sentence, such as `base outer_step (60) <
    network (61). Reload the global state`; the advice is empty if the rule gives none."""
    problem, _, advice = (reason or "").partition(". ")
    return problem.rstrip("."), f"{advice[:1].lower()}{advice[1:]}".rstrip(".")


def inspect_straggler(status: StatusDocument, memory: Memory) -> str:
    """Advise the reader to find out why one GPU is slower than the others."""
    rank = memory.straggler_rank
    place, option = "its GPU", ""
    if (gpu := _gpu_of(status, rank)) is not None:
        place, option = f"GPU {gpu}{_on_host(status)}", f"-i {gpu} "
    elif (process := status.rank_processes.get(str(rank))) is not None:
        place = f"the GPU of local rank {process.local_rank}{_on_host(status)}"
    query = f"`nvidia-smi {option}-q -d CLOCK,TEMPERATURE`"
    return (
        f"rank {rank} runs on {place}; check it with {query}, and all ranks with `miner-guard top`"
    )


def _start(status: StatusDocument) -> str:
    """The command that starts the guard again."""
    return f"`{status.start_command or 'miner-guard run'}`"


def _on_host(status: StatusDocument) -> str:
    return f" on host {status.host}" if status.host else ""


def _gpu_of(status: StatusDocument, rank: int | None) -> int | None:
    """NVML's index of the GPU that a rank reported in its diagnosis; None if unknown.

    Ranks are matched by GPU UUID: CUDA's numbering depends on CUDA_VISIBLE_DEVICES.
    """
    uuid = next((r.get("uuid") for r in status.diagnosis.ranks if r.get("rank") == rank), None)
    rows = (row for row in status.health.gpus.gpus if uuid and row.get("uuid") == uuid)
    return next((row.get("index") for row in rows), None)
