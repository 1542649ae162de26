"""`torchrun … -m miner_guard.demo.train --work DIR`: one rank of the demo miner."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import miner_guard
from miner_guard.demo.faults import FaultPlan
from miner_guard.demo.miner import Miner
from miner_guard.demo.miner_log import MinerLog
from miner_guard.demo.options import Options, parse


def main() -> None:
    """Train. Exits 0 at the configured end or after a stop signal, 1 on an exception."""
    options = parse()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plan = FaultPlan(
        list(options.faults),
        rank=rank,
        world_size=world_size,
        folder=options.work / "faults",
        repeat=options.fault_repeat,
    )
    device = _join(on_cpu=plan.on_cpu)
    guard = miner_guard.init()
    finished = False
    try:
        finished = _train(options, plan, guard, device)
    finally:
        guard.close(finished=finished)
    dist.destroy_process_group()


def _train(options: Options, plan: FaultPlan, guard: Any, device: torch.device) -> bool:
    try:
        return Miner(options, plan, guard, device).run()
    except Exception as error:
        MinerLog(dist.get_rank()).error(f"Training Loop Failed with error: {error}")
        if plan.swallow:
            # Subnet 38's miner does `except … break`, so the launcher sees success on every rank.
            guard.close()
            sys.exit(0)
        raise


def _join(*, on_cpu: bool) -> torch.device:
    """Join the process group, with NCCL if there are GPUs. Checkpoints and the gate use its CPU
    backend."""
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )
    if on_cpu or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


if __name__ == "__main__":
    main()
