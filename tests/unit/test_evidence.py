"""Evidence: the line that each rank is in, the rank that is late to a collective, kernel states in
words, processes that survive SIGKILL, and how much evidence is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.keeper.teardown import TERM_TO_KILL_S, UNKILLABLE_S, Teardown
from miner_guard.rank import dumps
from miner_guard.rank.layout import Identity
from miner_guard.state_dir import StateDir
from miner_guard.system import processes
from miner_guard.system.clock import FakeClock
from miner_guard.system.processes import Process
from miner_guard.watch.evidence import (
    MAX_INCIDENTS,
    Scene,
    Subject,
    incident_folder,
    innermost_user_frame,
    late,
    prune_incidents,
    waits_for_ranks,
)
from tests.support.contexts import context

PY_SPY = """Process 4242: python -u loops.py
Python v3.11.9 (/usr/bin/python3.11)

Thread 4250 (idle): "pin_memory"
    wait (threading.py:320)
    _pin_memory_loop (torch/utils/data/_utils/pin_memory.py:51)
Thread 4242 (idle): "MainThread"
    select (selectors.py:415)
    all_reduce (torch/distributed/distributed_c10d.py:2501)
    fetch (loops.py:14)
    <module> (loops.py:30)
"""

FAULTHANDLER = """pid 4242

Thread 0x00007f00 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f11 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/x.py", line 2501 in all_reduce
  File "/home/miner/neurons/miner.py", line 812 in fetch
  File "/home/miner/neurons/miner.py", line 1200 in <module>
"""

IN_LIBRARIES = (
    'Thread 1 (idle): "MainThread"\n    wait (threading.py:320)\n    run (torch/x.py:7)\n'
)

ASLEEP = """Thread 4243 (idle): "MainThread"
    stuck (inject.py:28)
    Optimizer.profile_hook_step.<locals>.wrapper (torch/optim/optimizer.py:538)
    <module> (with_fsdp.py:26)
"""


@pytest.mark.parametrize(
    ("dump", "frame", "waits"),
    [
        (PY_SPY, "loops.py:14", True),
        (FAULTHANDLER, "miner.py:812", True),
        (ASLEEP, "inject.py:28", False),
        (IN_LIBRARIES, "threading.py:320", False),
        ("", None, False),
        ("Error: Permission Denied (os error 13)\n", None, False),
    ],
)
def test_the_innermost_line_of_the_program_and_whether_it_waits_for_other_ranks(
    dump: str, frame: str | None, waits: bool
) -> None:
    assert innermost_user_frame(dump) == frame
    assert waits_for_ranks(dump) == waits


@pytest.mark.parametrize(
    ("waiting", "world", "outside"),
    [
        ((True, False, True), 3, (1,)),
        ((True, True), 2, ()),
        ((False, False), 2, ()),
        ((True, None, False), 3, ()),
        # Alone on its node, and in no collective: the ranks on other nodes wait for it.
        ((False,), 2, (0,)),
        ((False,), 1, ()),
    ],
)
def test_the_rank_outside_the_collective_is_the_one_that_the_others_wait_for(
    tmp_path: Path, waiting: tuple[bool | None, ...], world: int, outside: tuple[int, ...]
) -> None:
    """Under FSDP2 no phase distinguishes the ranks."""
    who = [
        Subject(Process(1, 1), tmp_path, n, Identity(1, n, n, world, 1, 0, len(waiting)), gone=True)
        for n, _ in enumerate(waiting)
    ]
    scene = Scene(context(tmp_path), tmp_path / "hang", who, 1.0)
    for subject, waits in zip(who, waiting, strict=True):
        subject.waits = waits
    assert scene.behind() == outside


RAS = "Communicators... 1 incomplete\n  Missing: rank 3 (GPU 3, host n1)\n"


class Ras(socketserver.StreamRequestHandler):
    """Stands in for NCCL's thread, which closes the connection after its report."""

    def handle(self) -> None:
        if self.rfile.readline() == b"CLIENT PROTOCOL 2\n":
            self.wfile.write(b"SERVER PROTOCOL 2\n")
            if self.rfile.readline() == b"VERBOSE STATUS\n":
                self.wfile.write(RAS.encode())


@pytest.mark.parametrize("serves", [True, False])
def test_nccls_own_report_is_evidence_where_a_rank_serves_it(
    serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Ras) as server:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.server_address[1]}")
        if serves:
            threading.Thread(target=server.handle_request, daemon=True).start()
        else:
            server.server_close()
        Scene(context(tmp_path), tmp_path / "hang", [], 1.0).store({})
    file = tmp_path / "hang" / "nccl-ras.txt"
    assert (file.read_text() if serves else file.exists()) == (RAS if serves else False)


def trace(*numbers: int, group: str = "default", name: str = "gloo:all_reduce") -> list[Any]:
    return [
        {"collective_seq_id": n, "process_group": group, "profiling_name": name, "is_p2p": False}
        for n in numbers
    ]


NCCL = "nccl:all_reduce"


@pytest.mark.parametrize(
    ("traces", "ranks", "words"),
    [
        (
            {0: trace(40, 41, 42), 1: trace(40, 41), 2: trace(41, 42)},
            (1,),
            "rank 1 is at collective 41, ranks 0,2 wait in collective 42 (gloo:all_reduce)",
        ),
        (
            {
                0: trace(9, group="a") + trace(2, group="b"),
                1: trace(9, group="a") + trace(1, group="b"),
            },
            (1,),
            "rank 1 is at collective 1, rank 0 waits in collective 2 (gloo:all_reduce)",
        ),
        (
            {r: trace(899 if r == 2 else 900, name=NCCL) + trace(7) for r in range(3)},
            (2,),
            "rank 2 is at collective 899, ranks 0,1 wait in collective 900 (nccl:all_reduce)",
        ),
        (
            {0: trace(4) + trace(5, name="gloo:barrier"), 1: trace(4, 5)},
            (0,),
            "the ranks are in different collectives: rank 0 in gloo:barrier, "
            "rank 1 in gloo:all_reduce",
        ),
        (
            {0: trace(5, name=NCCL), **{r: trace(5, name="nccl:barrier") for r in (1, 2)}},
            (0,),
            "the ranks are in different collectives: rank 0 in nccl:all_reduce, "
            "ranks 1,2 in nccl:barrier",
        ),
        (
            {0: trace(5), 1: trace(5, name="gloo:barrier")},
            (),
            "the ranks are in different collectives: rank 0 in gloo:all_reduce, "
            "rank 1 in gloo:barrier",
        ),
        ({0: trace(5), 1: trace(5)}, (), None),
        ({0: trace(5)}, (), None),
        ({0: [], 1: [{"collective_seq_id": None}]}, (), None),
    ],
)
def test_the_rank_with_the_smaller_number_or_another_operation_is_late(
    traces: dict[int, Any], ranks: tuple[int, ...], words: str | None
) -> None:
    found = late(traces)
    assert found == (None if words is None else ([*ranks], words))


def test_collectives_of_nccl_are_in_the_answer_beside_those_of_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU build of torch has only the other recorder, which would show only the guard's own group
    in a hang on GPUs."""

    def dump(*entries: dict[str, Any]) -> Callable[[], bytes]:
        return lambda: json.dumps({"entries": entries}).encode()

    nccl, gloo = dump(*trace(900, name=NCCL)), dump(*trace(7))
    fake = SimpleNamespace(_dump_nccl_trace_json=nccl, _dump_fr_trace_json=gloo)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", fake)
    entries: Any = dumps._last_collectives()["entries"]
    assert [e["profiling_name"] for e in entries] == ["nccl:all_reduce", "gloo:all_reduce"]
    del fake._dump_nccl_trace_json, fake._dump_fr_trace_json
    with pytest.raises(LookupError, match="has none of"):
        dumps._last_collectives()


WAITS_IN_THE_KERNEL = """
import ctypes, os, time
if ctypes.CDLL(None).vfork() == 0:
    # The parent waits in the kernel, uninterruptibly, as for an unresponsive disk.
    os.write(1, b"x")
    time.sleep(60)
"""


@pytest.fixture
def blocked() -> Iterator[Process]:
    """A process in D state."""
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS_IN_THE_KERNEL], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    try:
        # A starting interpreter is in D state for moments too, while it reads its files.
        assert child.stdout.read(1) == b"x"
        deadline = time.monotonic() + 20
        while (seen := processes.stat(child.pid)) is None or seen.state != "D":
            assert time.monotonic() < deadline, f"state {seen and seen.state}"
            time.sleep(0.05)
        yield seen.process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
        child.stdout.close()


def test_a_rank_in_d_state_is_reported_in_words(blocked: Process) -> None:
    state = Subject(blocked, Path()).kernel_state()
    assert state.startswith("uninterruptible (D state)")
    assert "SIGKILL does not help" in state


def test_a_process_that_survives_sigkill_is_named_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher, stuck = Process(2**22 + 1, 1), Process(2**22 + 2, 2)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(
        processes,
        "send",
        lambda process, *numbers: sent.extend((process.pid, n) for n in numbers) or True,
    )
    clock = FakeClock()
    fake_time = SimpleNamespace(monotonic=clock.monotonic, thread_time=time.thread_time)
    monkeypatch.setattr("miner_guard.keeper.teardown.time", fake_time)
    teardown = Teardown(lambda: {stuck}, launcher)
    teardown.launcher_ended()
    begin = clock.monotonic()
    while (wait := teardown.step()) is not None:
        clock.advance(wait)
        assert clock.monotonic() - begin < 60
    assert teardown.stuck == [stuck]
    assert {(stuck.pid, signal.SIGTERM), (stuck.pid, signal.SIGKILL)} <= set(sent)
    assert clock.monotonic() - begin == pytest.approx(TERM_TO_KILL_S + UNKILLABLE_S, abs=1.0)


def test_the_newest_folders_are_kept_and_unrelated_ones_left_alone(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for second in range(MAX_INCIDENTS + 7):
        label = "hang" if second % 2 else "cuda_oom"
        own = incident_folder(state, 1_800_000_000.0 + second, label)
        own.mkdir(parents=True)
        (own / "hang.json").write_text("{}\n")
    (state.incidents / "my-notes").mkdir()
    newest = sorted(state.incidents.glob("2*"))[-MAX_INCIDENTS:]
    for root in (state, state, StateDir(tmp_path / "none")):
        prune_incidents(root)
    assert sorted(state.incidents.iterdir()) == sorted([*newest, state.incidents / "my-notes"])
