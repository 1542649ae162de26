"""Many real ranks on one machine: processes forked from one that has imported torch, grouped into
nodes of PER_NODE, each with its own state directory. Each rank asks the gate and counts the
descriptors that the hook holds after each stage.

`python -m tests.support.many_ranks FOLDER RANKS PER_NODE BACKEND`; answers in rank-NNNN.json.
`gloo` is the miner's own full mesh; `fake` connects only to the launcher's store, which allows more
ranks on one machine than a mesh does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ranks import Ranks

REPO = Path(__file__).resolve().parents[2]
QUESTIONS = 20


@dataclass(frozen=True)
class Answers:
    """One rank's results."""

    opened: dict[str, list[str]]
    """By stage: targets of the descriptors that the hook holds at the end of that stage."""

    decisions: list[str]
    seconds: list[float]
    """Seconds for each question on this rank."""

    @property
    def connections(self) -> int:
        """Sockets that the hook holds: their number could grow with the number of ranks."""
        return max(
            sum(target.startswith("socket:") for target in held) for held in self.opened.values()
        )

    @property
    def descriptors(self) -> int:
        """The most descriptors that the hook holds at the end of any stage."""
        return max(map(len, self.opened.values()))


def run(folder: Path, ranks: int, per_node: int, backend: str, seconds: float) -> list[Answers]:
    """All ranks' results, by rank. Raises whatever subprocess.run raises."""
    words = [str(folder), str(ranks), str(per_node), backend]
    subprocess.run(
        [sys.executable, "-m", "tests.support.many_ranks", *words],
        check=True,
        timeout=seconds,
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    files = [folder / f"rank-{rank:04d}.json" for rank in range(ranks)]
    return [Answers(**json.loads(file.read_text())) for file in files]


def _descriptors() -> dict[str, str]:
    """This process's open descriptors and their targets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            # The descriptor used for this listing.
            continue
    return found


def _meet(store: Any, name: str, ranks: int) -> None:
    store.add(name, 1)
    while store.add(name, 0) < ranks:
        time.sleep(0.05)


def _rank(folder: Path, rank: int, ranks: int, per_node: int, backend: str, port: int) -> None:
    import torch.distributed as dist

    import miner_guard

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank % per_node))
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    _meet(store, "joined", ranks)
    before, opened = _descriptors(), {}

    def note(stage: str) -> None:
        held = [target for name, target in _descriptors().items() if before.get(name) != target]
        opened[stage] = sorted(held)

    guard = miner_guard.init(folder / f"node-{rank // per_node}")
    note("init")
    decisions, seconds = [], []
    for number in range(QUESTIONS):
        started = time.monotonic()
        decision = guard.may_upload(outer_step=1, inner_step=50 + number)
        seconds.append(time.monotonic() - started)
        decisions.append(f"{decision.decision_id}: {decision.reason}")
    note("the agreement")
    guard.diagnose()
    note("the diagnosis")
    for name in ("data", "forward", "backward", "optimizer", "of the miner's own"):
        with guard.phase(name):
            note(f"the phase {name}")
    guard.step(outer_step=1, inner_step=50, loss=1.0)
    note("a step")
    answers = {"opened": opened, "decisions": decisions, "seconds": seconds}
    (folder / f"rank-{rank:04d}.json").write_text(json.dumps(answers))
    guard.close(finished=True)
    store.add("done", 1)
    # Rank 0 hosts the store, so it exits last.
    while rank == 0 and store.add("done", 0) < ranks:
        time.sleep(0.05)


def main(folder: Path, ranks: int, per_node: int, backend: str) -> int:
    """Fork the ranks. Returns how many failed."""
    import torch
    import torch.distributed

    import miner_guard

    assert miner_guard
    torch.set_num_threads(1)
    if backend == "fake":
        # Registers itself.
        import torch.testing._internal.distributed.fake_pg
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    listeners = [Ranks() for _ in range(-(-ranks // per_node))]
    for rank in range(ranks):
        os.environ.update(listeners[rank // per_node].env)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(folder, rank, ranks, per_node, backend, port)
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    _folder, _ranks, _per_node, _backend = sys.argv[1:]
    sys.exit(main(Path(_folder), int(_ranks), int(_per_node), _backend) != 0)
