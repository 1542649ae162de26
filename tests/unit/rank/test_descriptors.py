"""The descriptors that the guard holds open in a rank; nothing is lost without them."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from miner_guard.rank import dumps, flight, layout
from miner_guard.rank.flight import FlightReader, FlightWriter, copy
from miner_guard.rank.guard import Guard
from miner_guard.rank.layout import StepRecord
from miner_guard.rank.recorder import Notifier
from miner_guard.state_dir import StateDir
from miner_guard.system.sockets import address
from miner_guard.watch.evidence import _ask
from tests.support.waiting import until
from tests.unit.rank.helpers import place


def listed() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            # The descriptor used for this listing.
            continue
    return found


def held() -> dict[str, str]:
    """Descriptors that stay open: rank threads from other tests briefly open a copy once a
    second."""
    # Garbage of other tests may still hold files open.
    gc.collect()
    last = listed()
    for _ in range(100):
        time.sleep(0.01)
        last, before = listed(), last
        if last == before:
            break
    return last


def test_a_supervised_rank_holds_its_record_and_one_socket(
    state: StateDir, listener: socket.socket
) -> None:
    """1,024 ranks on one machine must fit into `ulimit -n`. A mapping keeps one descriptor open,
    and each of its users used to keep another."""
    before = held()
    guard = Guard(place(state))
    guard.step(loss=1.0)
    opened = sorted(target for name, target in held().items() if before.get(name) != target)
    assert [target.partition(":")[0] for target in opened] == ["/memfd", "socket"], opened
    guard.close(finished=True)


def record(tmp_path: Path) -> FlightWriter:
    return FlightWriter(tmp_path / "rank-0000.bin", rank=0, local_rank=0, world_size=1, run_id="r")


@pytest.mark.parametrize("damage", ["truncated", "written"])
def test_a_copy_that_others_changed_is_rewritten_completely(tmp_path: Path, damage: str) -> None:
    writer = record(tmp_path)
    path = writer.path
    copy(path, writer.map)
    before = held()
    if damage == "truncated":
        os.truncate(path, 100)
    else:
        path.write_bytes(b"\0" * layout.FILE_SIZE)
    writer.journal({"kind": "event", "n": damage})
    copy(path, writer.map)
    writer.close()
    assert path.read_bytes()[: layout.HEADER_SIZE].startswith(layout.MAGIC)
    assert [entry["n"] for _, entry in FlightReader(path).entries()] == [damage]
    assert len(held()) < len(before), "only the record was open, and it is closed"


def test_a_copy_made_while_the_rank_goes_on_stepping_misses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's header once counted steps that were written after its steps had been copied, and
    later copies began behind them."""
    writer, whole = record(tmp_path), flight._write
    copy(writer.path, writer.map)

    def slow(*arguments: Any) -> None:
        writer.append(StepRecord(start=1.0, end=2.0))
        whole(*arguments)

    monkeypatch.setattr(flight, "_write", slow)
    for _ in range(3):
        writer.append(StepRecord(start=1.0, end=2.0))
        copy(writer.path, writer.map)
    monkeypatch.undo()
    copy(writer.path, writer.map)
    written = writer._words[layout.STEPS]
    writer.close()
    assert [s.number for s in FlightReader(writer.path).steps()] == list(range(written))


CONSOLE = """
import os, socket, sys
from miner_guard.record.events import event
from miner_guard.rank.environment import find
from miner_guard.rank.recorder import Recorder
place = find({}, sys.argv[1])
supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
place.state.socket.unlink(missing_ok=True)
supervisor.bind(str(place.state.socket))
recorder = Recorder(place)
assert not recorder.notifier.alone
supervisor.close()
if sys.argv[2:]:
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), 1)
recorder.emit(event("rank_message", "info", "the supervisor is gone", text="…"))
recorder.close("closed")
"""


def test_a_rank_prints_on_the_console_that_it_started_with_and_into_no_other_file(
    tmp_path: Path,
) -> None:
    """A supervised rank opens the console when it loses the supervisor: by then the program may
    have reused descriptor 1 for one of its files."""
    weights = tmp_path / "weights"
    command = [sys.executable, "-c", CONSOLE, str(tmp_path)]
    same = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE)
    assert b"the supervisor is gone" in same.stdout
    other = subprocess.run([*command, str(weights)], check=True, timeout=60, stdout=subprocess.PIPE)
    assert (other.stdout, weights.read_bytes()) == (b"", b"")


@pytest.mark.parametrize("depth", [1, 12])
def test_a_rank_reports_its_collectives_through_its_existing_socket(
    tmp_path: Path, depth: int
) -> None:
    """It also responds if its path is too long for a socket's address."""
    state = StateDir(tmp_path.joinpath(*["a-long-name"] * depth))
    state.flight.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        with address(state.socket) as name:
            supervisor.bind(name)
        notifier = Notifier(state.socket)
        before = held()
        dump = state.collectives_of(0)
        assert not _ask(dump), "no process listens yet"
        dumps.serve(notifier, dump)
        assert notifier.notify(0)
        assert json.loads(supervisor.recv(100)) == {"bell": 0}
        assert _ask(dump)
        until(dump.exists, 30, "the dump")
        assert json.loads(dump.read_text()).keys() <= {"entries", "error"}
        assert held() == before
        notifier.close()
