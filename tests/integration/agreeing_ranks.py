"""The program that each rank in `test_rank_agreement` runs; it writes its answers to
rank-N.json."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import miner_guard
from miner_guard.rank.guard import Guard

ASKED = 150


def ask(guard: Guard, inner_step: int) -> dict[str, Any]:
    decision = guard.may_upload(outer_step=1, inner_step=inner_step)
    return {"allowed": decision.allowed, "id": decision.decision_id, "reason": decision.reason}


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    guard = miner_guard.init(folder / "state")
    answers: dict[str, Any] = {"together": [], "notices": []}
    for number in range(ASKED):
        answers["together"].append(ask(guard, 50 + number))
        guard.step(inner_step=number)
        answers["notices"].append([guard.upload_due(), guard.checkpoint_requested()])

    # The same without the exchange: each rank checks for itself.
    questions, place = guard._questions, guard._questions._place
    setattr(questions, "agreement", lambda: None)  # noqa: B010
    questions._place = replace(place, rank=0)
    answers["each by itself"] = []
    for number in range(ASKED):
        # The ranks drift apart as real ones do, so they see the repo at different times.
        time.sleep(0.0007 * rank)
        answers["each by itself"].append(ask(guard, 50 + number)["allowed"])
    del questions.agreement
    questions._place = place

    dist.barrier()
    answers["different questions"] = ask(guard, 50 + (rank == size - 1))
    answers["after that"] = ask(guard, 400)

    done = [folder / f"asked-{r}" for r in range(size - 1)]
    if rank == size - 1:
        for path in done:
            wait_for(path)
    started = time.monotonic()
    answers["one is silent"] = ask(guard, 60)
    answers["waited_s"] = time.monotonic() - started
    (folder / f"asked-{rank}").touch()
    answers["ever after"] = ask(guard, 61)
    answers["errors"] = guard.error_count
    guard.close(finished=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
