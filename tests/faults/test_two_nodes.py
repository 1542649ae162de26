"""Two nodes on one machine, as two network namespaces with a link between them that can be cut.

torchrun trains on both, at the default limits. After each fault, both guards name the culprit, and
both nodes train again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard import __version__
from miner_guard.guard.control_socket import ask
from tests.faults.guarded import MINERS, REPO, Guarded, lives, until
from tests.support import requires
from tests.support.present_state import status_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PORT = 29444
ADDRESSES = ("10.231.77.1", "10.231.77.2")
AGAIN_S = 12.0
"""From a fault to training again, without the time of a start: torchrun ends its ranks, the guard
waits 2 s, and both nodes have to meet."""

PARTITION_S = 45.0


class Nodes:
    """Namespaces `a` and `b`, a guard in each, and the steps of all ranks."""

    def __init__(self, folder: Path) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"mg-{mark}-a", f"mg-{mark}-b"]
        self.guards: list[Guarded] = []
        for name in "ab":
            (folder / name).mkdir()
            self.guards.append(Guarded(folder / name))
        self.package = REPO
        """The folder that the guards import."""

        self.start_s = 0.0
        """How long the first start took."""

        self._steps = folder / "steps"

    def link(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        a, b = self.names
        _ip("-n", a, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", b)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "veth0", "up")

    def set_link(self, state: str) -> None:
        _ip("-n", self.names[1], "link", "set", "veth0", state)

    def remove(self) -> None:
        for guard in self.guards:
            guard.clean()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, node: int, command: list[str]) -> None:
        guard, program = self.guards[node], self._steps.with_name(f"python-{node}")
        program.write_text(
            f'#!/bin/sh\nexec ip netns exec {self.names[node]} {sys.executable} "$@"\n'
        )
        program.chmod(0o755)
        guard.python = str(program)
        network = {"GLOO_SOCKET_IFNAME": "veth0", "TP_SOCKET_IFNAME": "veth0"}
        env = {"PYTHONPATH": str(self.package), "OMP_NUM_THREADS": "1", **network}
        lines = {"logs.step_lines_per_s": 100}
        guard.start(command, settings=lines, env=env, cwd=guard.output.parent)

    def torchrun(self, node: int) -> list[str]:
        requires.module("torch")
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
            f"--rdzv-id={self.names[0]}",
            # torch looks its own address up by the host's name, which two namespaces share.
            f"--rdzv-conf=is_host={int(node == 0)},last_call_timeout=3",
            f"--local-addr={ADDRESSES[node]}",
            "--max-restarts=0",
            *(str(MINERS / "all_reduce.py"), str(self._steps), self.guards[node].token),
        ]

    def train(self) -> None:
        began = time.monotonic()
        for node in range(2):
            self.start(node, self.torchrun(node))
        self.wait_for_steps(began, 150)
        self.start_s = time.monotonic() - began

    def wait_for_steps(self, since: float, seconds: float) -> None:
        """Wait until both ranks have stepped after `since`."""

        def stepped() -> bool:
            rows = (line.split() for line in self._lines() if line.count(" ") == 2)
            return len({rank for end, rank, _world in rows if float(end) > since}) == 2

        until(stepped, seconds, lambda: "\n".join(guard.tail() for guard in self.guards))

    def _lines(self) -> list[str]:
        return self._steps.read_text().splitlines() if self._steps.exists() else []

    def trains_again(self, since: float) -> None:
        self.wait_for_steps(since + 1.0, self.start_s + AGAIN_S)

    def rank_of(self, node: int) -> int:
        guard = self.guards[node]
        ranks = until(lambda: status_of(guard.state.root)["rank_processes"], 30, guard.tail)
        (rank,) = ranks.values()
        return int(rank["pid"])

    def kill_keeper_of_b(self) -> float:
        """Returns when."""
        at = time.monotonic()
        os.kill(self.guards[1].keeper_pid, signal.SIGKILL)
        self.guards[1].processes[-1].wait(60)
        self.guards[1].assert_nothing_left(3)
        return at

    def stop(self) -> None:
        for guard in self.guards:
            guard.processes[-1].terminate()
        for guard in self.guards:
            assert guard.processes[-1].wait(60) == 0
            guard.assert_nothing_left()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    requires.tool("ip")
    made = Nodes(tmp_path)
    try:
        made.link()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield made
    made.remove()


def test_both_nodes_report_a_cut_link_and_its_return(nodes: Nodes) -> None:
    serve = (
        f"import socket, time\ns = socket.create_server(({ADDRESSES[0]!r}, {PORT}))\n"
        "time.sleep(600)"
    )
    join = (
        "import socket, time\nwhile True:\n    try: s = socket.create_connection"
        f"(({ADDRESSES[0]!r}, {PORT})); break\n    except OSError: time.sleep(0.1)\ntime.sleep(600)"
    )
    where = ["--nnodes=2", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}"]
    for node, code in enumerate((serve, join)):
        nodes.start(node, [sys.executable, "-c", code, *where])
    _both_know_each_other(nodes)
    nodes.set_link("down")
    for guard, other in zip(nodes.guards, reversed(ADDRESSES), strict=True):
        assert guard.wait_for("network_unreachable")["node"] == other
    nodes.set_link("up")
    for guard, other in zip(nodes.guards, reversed(ADDRESSES), strict=True):
        assert guard.wait_for("network_unreachable", 2)["node"] == other
    nodes.stop()


def _both_know_each_other(nodes: Nodes) -> None:
    def knows(guard: Guarded, other: str) -> bool:
        known = status_of(guard.state.root).get("nodes") or {}
        return bool(known.get(other, {}).get("reachable"))

    for guard, other in zip(nodes.guards, reversed(ADDRESSES), strict=True):
        until(guard.state.db.exists, 60, "run.db")
        until(lambda guard=guard, other=other: knows(guard, other), 60, guard.tail)


@pytest.mark.long
def test_a_killed_rank_is_named_on_both_nodes_and_training_resumes(nodes: Nodes) -> None:
    """The other node was told `nccl_network_error` only, and this one that rank 0 had died."""
    nodes.train()
    at = time.monotonic()
    os.kill(nodes.rank_of(1), signal.SIGKILL)
    nodes.trains_again(at)
    here, there = (guard.wait_for("incident") for guard in reversed(nodes.guards))
    assert (here["label"], here["rank"]) == ("process_killed", 1)
    assert f"lost contact with {ADDRESSES[1]}" in there["msg"]
    nodes.stop()


@pytest.mark.long
def test_a_killed_guard_costs_no_step_on_either_node(nodes: Nodes) -> None:
    nodes.train()
    ranks = [nodes.rank_of(node) for node in range(2)]
    os.kill(nodes.guards[1].guard_pid, signal.SIGKILL)
    nodes.wait_for_steps(time.monotonic(), 10)
    assert "the miner kept running" in nodes.guards[1].wait_for("guard_killed")["msg"]
    nodes.wait_for_steps(time.monotonic(), 10)
    assert all(map(lives, ranks))
    nodes.stop()


@pytest.mark.long
def test_a_node_whose_keeper_is_killed_leaves_nothing_and_joins_again(nodes: Nodes) -> None:
    nodes.train()
    at = nodes.kill_keeper_of_b()
    nodes.start(1, nodes.torchrun(1))
    nodes.trains_again(at)
    assert "SIGKILL" in nodes.guards[1].wait_for("guard_killed")["msg"]
    lost = nodes.guards[0].wait_for("incident")
    assert f"lost contact with {ADDRESSES[1]}" in lost["msg"]
    nodes.stop()


@pytest.mark.long
def test_a_partition_is_named_on_both_nodes_and_outlived(nodes: Nodes) -> None:
    nodes.train()
    _both_know_each_other(nodes)
    ranks = [nodes.rank_of(node) for node in range(2)]
    nodes.set_link("down")
    cut = time.monotonic()
    for guard, other in zip(nodes.guards, reversed(ADDRESSES), strict=True):
        assert guard.wait_for("network_unreachable", seconds=30)["node"] == other
    time.sleep(max(0.0, cut + PARTITION_S - time.monotonic()))
    with pytest.raises(AssertionError):
        nodes.wait_for_steps(cut + 5, 0.1)
    nodes.set_link("up")
    nodes.wait_for_steps(time.monotonic(), 25)
    assert all(map(lives, ranks)), "nobody was restarted"
    nodes.stop()


@pytest.mark.long
def test_a_frozen_rank_is_named_on_both_nodes_and_training_resumes(nodes: Nodes) -> None:
    nodes.train()
    os.kill(nodes.rank_of(1), signal.SIGSTOP)
    waiting, frozen = (guard.wait_for("hang_detected", seconds=400) for guard in nodes.guards)
    at = time.monotonic()
    assert frozen["culprits"] == [1]
    assert "state T" in frozen["msg"]
    assert "rank 1 on other nodes" in waiting["msg"]
    nodes.trains_again(at)
    nodes.stop()


@pytest.mark.long
def test_both_guards_are_upgraded_while_torchrun_trains(nodes: Nodes, tmp_path: Path) -> None:
    nodes.package = tmp_path / "site"
    package = nodes.package / "miner_guard"
    shutil.copytree(REPO / "miner_guard", package, ignore=shutil.ignore_patterns("__pycache__"))
    nodes.train()
    ranks = [nodes.rank_of(node) for node in range(2)]
    init = package / "__init__.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', '"99.0"'))
    for guard in nodes.guards:
        assert "the miner keeps running" in json.dumps(ask(guard.state, {"do": "reload"}))
    for guard in nodes.guards:
        started = guard.wait_for("guard_started", 2)
        assert (started["version"], started["replaced"]) == ("99.0", __version__)
        count = len(guard.named("inner_step"))
        guard.wait_for("inner_step", count + 20)
        recorded = [event["inner_step"] for event in guard.named("inner_step")]
        assert recorded == list(range(1, len(recorded) + 1)), "no step is missing"
        assert not guard.named("guard_killed")
    assert all(map(lives, ranks))
    nodes.stop()
