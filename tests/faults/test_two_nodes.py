"""Two nodes on one machine, as two network namespaces with a link between them that can be cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.faults.guarded import MARK, REPO, Guarded, until
from tests.support import requires
from tests.support.present_state import status_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = {
    "MINER_GUARD_GPU__PREFLIGHT": "false",
    "MINER_GUARD_MINER__STOP_TIMEOUT_S": "35",
    "MINER_GUARD_RESTART__BACKOFF_S": "0.5",
    "MINER_GUARD_LOGS__STEP_LINES_PER_S": "100",
    "MINER_GUARD_HANG__MIN_S": "15",
    "MINER_GUARD_HANG__FIRST_STEP_S": "90",
    # The other agent waits for the killed one in its exit barrier, for 300 s by default.
    "MINER_GUARD_HANG__EXIT_S": "10",
}
PORT = 29444


class Link:
    """Namespaces `a` and `b` with the addresses .1 and .2."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"mg-{mark}-a", f"mg-{mark}-b"]
        self.addresses = ["10.231.77.1", "10.231.77.2"]

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        a, b = self.names
        _ip("-n", a, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", b)
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "veth0", "up")

    def set(self, state: str) -> None:
        _ip("-n", self.names[1], "link", "set", "veth0", state)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def link() -> Iterator[Link]:
    requires.tool("ip")
    made = Link()
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield made
    made.remove()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Guarded]]:
    guards = []
    for name in "ab":
        (tmp_path / name).mkdir()
        guards.append(Guarded(tmp_path / name))
    yield guards
    for guard in guards:
        guard.clean()


def start(
    guard: Guarded,
    link: Link,
    node: int,
    command: list[str],
    settings: Mapping[str, str] = SETTINGS,
) -> None:
    line = [
        "ip",
        "netns",
        "exec",
        link.names[node],
        sys.executable,
        "-m",
        "miner_guard",
        "run",
        "--state-dir",
        str(guard.state.root),
        "--",
        *command,
    ]
    env = {
        **os.environ,
        **settings,
        MARK: guard.token,
        "PYTHONPATH": str(REPO),
        "GLOO_SOCKET_IFNAME": "veth0",
        "TP_SOCKET_IFNAME": "veth0",
    }
    with guard.output.open("ab") as out:
        guard.processes.append(
            subprocess.Popen(line, env=env, stdout=out, stderr=subprocess.STDOUT)
        )


def torchrun(link: Link, tmp_path: Path, node: int, *flags: str) -> list[str]:
    requires.module("torch")
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={link.addresses[0]}:{PORT}",
        f"--rdzv-id={link.names[0]}",
        # torch looks its own address up by the host's name, which two namespaces share.
        f"--rdzv-conf=is_host={int(node == 0)}",
        f"--local-addr={link.addresses[node]}",
        "--max-restarts=0",
        "-m",
        "miner_guard.demo.train",
        "--work",
        str(tmp_path / "work"),
        "--steps",
        "100000",
        "--effective-batch-size",
        "8",
        "--batch-size",
        "4",
        "--upload-steps",
        "100000",
        "--inner-steps-per-outer",
        "100000",
        *flags,
    ]


def test_both_nodes_report_a_cut_link_and_its_return(link: Link, pair: list[Guarded]) -> None:
    serve = (
        f"import socket, time\ns = socket.create_server(({link.addresses[0]!r}, "
        f"{PORT}))\ntime.sleep(600)"
    )
    join = (
        "import socket, time\nwhile True:\n    try: s = socket.create_connection"
        f"(({link.addresses[0]!r}, {PORT})); break\n    except OSError: "
        "time.sleep(0.1)\ntime.sleep(600)"
    )
    where = ["--nnodes=2", f"--rdzv-endpoint={link.addresses[0]}:{PORT}"]
    start(pair[0], link, 0, [sys.executable, "-c", serve, *where])
    start(pair[1], link, 1, [sys.executable, "-c", join, *where])
    _cut_and_mend(link, pair)
    for guard in pair:
        assert guard.stop() == 0
        guard.assert_nothing_left()


def _cut_and_mend(link: Link, pair: list[Guarded]) -> None:
    for guard, other in zip(pair, reversed(link.addresses), strict=True):
        until(guard.state.db.exists, 60, "run.db")
        until(
            lambda guard=guard, other=other: (
                f'"{other}"' in json.dumps(status_of(guard.state.root))
            ),
            60,
            "the node is known",
        )
        until(
            lambda guard=guard: '"reachable": true' in json.dumps(status_of(guard.state.root)),
            60,
            "the node answers",
        )
    link.set("down")
    for guard, other in zip(pair, reversed(link.addresses), strict=True):
        assert guard.wait_for("network_unreachable", seconds=60)["node"] == other
    link.set("up")
    for guard, other in zip(pair, reversed(link.addresses), strict=True):
        assert guard.wait_for("network_unreachable", 2, seconds=60)["node"] == other


@pytest.mark.long
def test_torchrun_on_two_nodes_survives_a_cut_link_and_a_killed_guard(
    link: Link, pair: list[Guarded], tmp_path: Path
) -> None:
    for node, guard in enumerate(pair):
        start(guard, link, node, torchrun(link, tmp_path, node))
    pair[0].wait_for("inner_step", 2, seconds=150)
    pair[1].wait_for("inner_step", 2, seconds=60)
    _cut_and_mend(link, pair)
    steps = len(pair[0].named("inner_step"))
    pair[0].wait_for("inner_step", steps + 2, seconds=120)
    victim = pair[1].named("guard_started")[0]["pid"]
    os.kill(victim, 9)
    pair[1].processes[0].wait(60)
    pair[1].assert_nothing_left(60)
    start(pair[1], link, 1, torchrun(link, tmp_path, 1))
    steps = len(pair[0].named("inner_step"))
    pair[0].wait_for("inner_step", steps + 2, seconds=200)
    for guard in pair:
        guard.processes[-1].terminate()
    for guard in pair:
        guard.processes[-1].wait(60)
        guard.assert_nothing_left()


@pytest.mark.long
def test_a_hang_of_another_nodes_rank_is_reported_by_both_and_training_continues(
    link: Link, pair: list[Guarded], tmp_path: Path
) -> None:
    """The node with the waiting rank points to the other node, which names its rank; both restart,
    and the next launch resumes at most one step back."""
    hung_at = 8
    for node, guard in enumerate(pair):
        # The node that waits detects the hang first, before the other node's restart ends its rank.
        settings = {**SETTINGS, "MINER_GUARD_HANG__MIN_S": "20" if node else "8"}
        command = torchrun(link, tmp_path, node, "--fault", f"hang@{hung_at}:1")
        start(guard, link, node, command, settings)
    waiting = pair[0].wait_for("hang_detected", seconds=200)
    assert waiting["culprits"] == []
    assert "1 rank on other nodes" in waiting["msg"], waiting["msg"]
    hung = pair[1].wait_for("hang_detected", seconds=100)
    assert hung["culprits"] == [1]
    assert "rank 1 in data for" in hung["msg"]
    resumed = pair[0].wait_for("checkpoint", seconds=200, line="CHECKPOINT RESUMED")
    assert resumed["step"] in (hung_at - 2, hung_at - 1)
    for guard in pair:
        until(
            lambda guard=guard: (
                len(guard.named("miner_started")) == 2
                and guard.named("inner_step")[-1]["inner_step"] > hung_at
            ),
            150,
            guard.tail,
        )
    for guard in pair:
        guard.processes[-1].terminate()
    for guard in pair:
        guard.processes[-1].wait(60)
        guard.assert_nothing_left()
