"""A rank that calls `diagnose` in a deliberately created state; test_across_ranks.py runs it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from miner_guard.rank import diagnose
from miner_guard.rank.environment import find
from miner_guard.rank.journal import JournalEntry, TrainingEntry
from miner_guard.record.events import Event


class Host:
    """The hook as seen by `diagnose`, with a list in place of the journal."""

    def __init__(self, supervised: bool) -> None:
        self.place = find()
        self.supervised = supervised
        self.journaled: list[dict[str, Any]] = []
        self.messages: list[Event] = []

    def journal(self, entry: JournalEntry) -> bool:
        self.journaled.append(json.loads(json.dumps(entry.to_json())))
        return self.supervised

    def emit(self, event: Event) -> None:
        self.messages.append(event)


def build(case: str) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    policy = CPUOffloadPolicy(pin_memory=False) if case == "offload" else None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, **({"offload_policy": policy} if policy else {}))


GPU = {"cuda_available": True, "gpu_count": 1, "cuda_context": True, "allocated_bytes": 18 << 30}
"""What a machine with GPUs would report."""


def one(case: str, deadline_s: float, supervised: bool, expect: int | None) -> dict[str, Any]:
    host = Host(supervised)
    model = build(case)
    real_facts, real = diagnose.cuda_facts, diagnose.placement
    if case == "offload":
        diagnose.cuda_facts = lambda _device: GPU
        # FSDP2 needs a real mesh to shard over; only its device type is changed.
        diagnose.placement = lambda m: {**real(m), "mesh_device": "cuda"}
    started = time.monotonic()
    reports = []
    if not (case == "silent" and host.place.rank == 1):
        reports = diagnose.diagnose(
            cast(Any, host),
            model,
            TrainingEntry(batch_size=2, effective_batch_size=512),
            deadline_s=deadline_s,
            expect=expect,
        )
    seconds = time.monotonic() - started
    diagnose.placement, diagnose.cuda_facts = real, real_facts
    messages = [{"event": f.name, "line": f.text, "fields": dict(f.fields)} for f in host.messages]
    # The group still works: diagnose must not break the next collective, not even after a silent
    # rank.
    total = torch.ones(1)
    dist.all_reduce(total)
    return {
        "reports": reports,
        "seconds": seconds,
        "journal": host.journaled,
        "said": messages,
        "sum": total.item(),
    }


def main(out: str) -> None:
    dist.init_process_group("gloo")
    answers = {"offload": one("offload", 60.0, False, None)}
    answers["plain"] = one("plain", 60.0, False, 0)
    answers["gpu_expected"] = one("plain", 60.0, False, dist.get_world_size())
    answers["supervised"] = one("plain", 60.0, True, None)
    answers["silent"] = one("silent", 2.0, False, 0)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
