"""The guard's own process: one per state directory, its loop, socket and link to the keeper."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.guard import lock
from miner_guard.guard.control_socket import ControlSocket, NotRunning, ask
from miner_guard.guard.engines import start_command
from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.guard.lock import LockHeld, acquire
from miner_guard.guard.loop import Loop
from miner_guard.guard.preflight import GpuMemoryWait, still_held
from miner_guard.record.store import RUN_SECTION, RunStore, now_row
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock, SystemClock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setattr(lock, "WAIT_S", 0.2)
    return StateDir(tmp_path / "deep" / "state")


def test_a_second_guard_is_refused_and_the_holder_named_until_all_holders_are_gone(
    folder: StateDir,
) -> None:
    own = os.getpid()
    guards, last_boot = acquire(folder, own)
    keepers = os.dup(guards)
    os.close(guards)
    assert last_boot is None
    assert json.loads(folder.lock.read_text())["pid"] == own
    with pytest.raises(LockHeld, match=f"the guard with pid {own} is running there"):
        acquire(folder, 1)
    os.close(keepers)
    mine, last_boot = acquire(folder, 1)
    assert last_boot == json.loads(folder.lock.read_text())["boot"]
    os.close(mine)


@pytest.mark.parametrize("how", ["the process is gone", "it is stopping"])
def test_a_second_guard_waits_longer_for_one_that_is_leaving(folder: StateDir, how: str) -> None:
    """On a loaded machine a stop took longer than the wait: the refusal ended a service for good,
    because systemd and pm2 do not start again what exits with 78."""
    held, _ = acquire(folder, 2**22 + 1 if how == "the process is gone" else os.getpid())
    store = RunStore(folder.db)
    store.write(now_row(RUN_SECTION, {"state": "running" if "gone" in how else "stopping"}))
    store.close()
    release = threading.Timer(1.0, os.close, [held])
    release.start()
    mine, _ = acquire(folder, os.getpid())
    release.join()
    os.close(mine)


def test_a_lock_file_that_was_removed_meanwhile_is_not_taken(
    folder: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two guards could each hold a lock: one on the file, the other on the removed
    file."""
    opened = lock.open_private
    removed: list[Path] = []

    def open_and_lose(path: Path, flags: int) -> int:
        fd = opened(path, flags)
        if not removed:
            removed.append(path)
            path.unlink()
        return fd

    monkeypatch.setattr(lock, "open_private", open_and_lose)
    mine, _ = acquire(folder, 2)
    assert os.fstat(mine).st_ino == folder.lock.stat().st_ino
    os.close(mine)


def test_what_is_not_a_lock_file_is_refused_without_waiting_for_its_other_end(
    folder: StateDir,
) -> None:
    folder.root.mkdir(parents=True)
    os.mkfifo(folder.lock)
    with pytest.raises(LockHeld, match="cannot write to state directory"):
        acquire(folder, 1)


_PM2 = {"pm_id": "0", "pm_exec_path": "/usr/bin/miner-guard", "name": "sn38 miner"}
_SYSTEMD = {"NOTIFY_SOCKET": "/run/systemd/notify"}
_ARGV = ["/opt/venv/bin/miner-guard", "run", "--name", "a b", "--", "torchrun", "m.py"]


@pytest.mark.parametrize(
    ("env", "cgroup", "command"),
    [
        (_PM2, "0::/\n", "pm2 restart 'sn38 miner'"),
        ({**_PM2, "name": ""}, "0::/\n", "pm2 restart 0"),
        (
            _SYSTEMD,
            "0::/system.slice/miner-guard.service\n",
            "systemctl restart miner-guard.service",
        ),
        (
            _SYSTEMD,
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/mg@1.service\n",
            "systemctl --user restart mg@1.service",
        ),
        (
            {},
            "0::/system.slice/cron.service\n",
            "cd '/home/me/my miner' && miner-guard run --name 'a b' -- torchrun m.py",
        ),
    ],
)
def test_it_is_the_service_managers_or_the_command_line(
    env: dict[str, str], cgroup: str, command: str
) -> None:
    """At four in the morning, "start the guard" is not enough, and `systemctl restart cron` is
    wrong."""
    assert start_command(env, _ARGV, cgroup, "/home/me/my miner") == command


def test_a_guard_run_as_a_module_is_started_as_a_module() -> None:
    argv = ["/opt/miner_guard/__main__.py", "run", "--", "true"]
    assert start_command({}, argv, "0::/\n", "/x") == "cd /x && python -m miner_guard run -- true"


COMMAND = "x" * 1_500_000
"""`status` must not say that no guard is running: a socket accepts 200 KB at once, but a command
can have up to 2 MB."""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    state = StateDir(tmp_path)
    loop = Loop(SystemClock(), lambda error: pytest.fail(repr(error)))
    control = ControlSocket(state, loop.soon, lambda request: {"command": COMMAND, **request})
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            loop.after(0.01, lambda: None)
            loop.turn()

    supervisor = threading.Thread(target=turn)
    supervisor.start()
    yield state
    control.close()
    over.set()
    supervisor.join(10)
    loop.close()
    assert not state.control.exists()


def send(state: StateDir, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(state.control))
        client.sendall(data)
        return client.makefile("rb").readline()


def test_a_long_answer_arrives_whole_although_another_client_is_silent(state: StateDir) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(state.control))
        answer: Any = ask(state, {"do": "x"})
    assert (answer["command"], answer["do"]) == (COMMAND, "x")
    assert state.control.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("line", [b"[" * 60_000, b"x\n", b"[]\n", b"\xff\n"])
def test_a_request_that_makes_no_sense_gets_an_answer(state: StateDir, line: bytes) -> None:
    """Input that anyone may send must not cause an internal error."""
    assert b"error" in send(state, line.ljust(70_000) if line[-1:] != b"\n" else line)


def test_without_a_guard_the_client_learns_that(tmp_path: Path) -> None:
    with pytest.raises(NotRunning):
        ask(StateDir(tmp_path), {"do": "status"})


def test_output_that_waited_arrives_as_one_piece_and_in_order_with_the_messages() -> None:
    """Its lines share their time of arrival: the steps of a fast miner once took no time."""
    keeper, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper.send(json.dumps({"hello": {"keeper_pid": 1}}).encode())
    client, heard = KeeperClient(link), list[object]()
    client.on_output = heard.append
    client.on_stop = heard.append
    for packet in (b"\0one\n", b"\0two\n", json.dumps({"stop": "TERM"}).encode(), b"\0three\n"):
        keeper.send(packet)
    loop = Loop(FakeClock(), on_error=heard.append)
    client.watch(loop)
    loop.turn()
    assert heard == [b"one\ntwo\n", "TERM", b"three\n"]
    loop.close()
    keeper.close()
    link.close()


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def loop(errors: list[Exception]) -> Iterator[Loop]:
    made = Loop(SystemClock(), errors.append)
    yield made
    made.close()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def turn(loop: Loop, times: int = 1) -> None:
    for _ in range(times):
        loop.after(0.01, lambda: None)
        loop.turn()


def fail() -> None:
    raise RuntimeError("a defect")


def test_a_signal_is_heard_after_its_handler_failed(loop: Loop, errors: list[Exception]) -> None:
    """One exception in any signal handler once released the wake-up pipe and left the guard
    deaf."""
    heard: list[int] = []

    def once() -> None:
        heard.append(len(heard))
        if len(heard) == 1:
            fail()

    loop.on_signal(signal.SIGUSR1, once)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
        turn(loop)
    assert heard == [0, 1, 2]
    assert len(errors) == 1


def test_a_signal_that_does_not_wake_the_loop_is_heard_at_its_next_turn(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop once waited for a byte that never came through the pipe."""
    heard: list[str] = []
    loop.on_signal(signal.SIGUSR1, lambda: heard.append("stop"))
    monkeypatch.setattr(loop, "wake", lambda: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    turn(loop)
    assert heard == ["stop"]


def test_a_timer_that_fails_each_time_keeps_its_pace(loop: Loop, errors: list[Exception]) -> None:
    loop.every(0.001, fail)
    while len(errors) < 3:
        loop.turn()


def test_a_report_that_fails_as_well_ends_nothing(loop: Loop) -> None:
    """A broken log must not take the miner down with it."""

    def broken(_error: Exception) -> None:
        raise OSError(28, "No space left on device")

    loop.on_error = broken
    loop.soon(fail)
    turn(loop)
    done: list[bool] = []
    loop.soon(lambda: done.append(True))
    turn(loop)
    assert done == [True]


def test_a_descriptor_whose_handler_fails_costs_no_core(
    loop: Loop, errors: list[Exception]
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x")
    loop.watch(reading, fail)
    began = time.process_time()
    for _ in range(3):
        loop.turn()
    assert time.process_time() - began < 0.1
    assert len(errors) == 3
    loop.unwatch(reading)
    turn(loop)
    assert len(errors) == 3
    os.close(reading)
    os.close(writing)


def test_a_wait_that_fails_does_not_end_the_guard(
    loop: Loop, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single OSError from epoll would otherwise have ended the guard, and the miner."""
    whole = loop._selector.select
    answers = iter([OSError(12, "Cannot allocate memory")])

    def select(timeout: float | None = None) -> object:
        for error in answers:
            raise error
        return whole(timeout)

    monkeypatch.setattr(loop._selector, "select", select)
    called = threading.Event()
    loop.soon(called.set)
    loop.turn()
    loop.turn()
    assert called.is_set()
    assert [type(error) for error in errors] == [OSError]


GIB = 1024**3


def test_only_growth_beyond_the_slack_is_held() -> None:
    before = {"GPU-a": 2 * GIB, "GPU-b": 0}
    assert still_held(before, {"GPU-a": 2 * GIB + 1000, "GPU-b": 9 * GIB, "GPU-new": 30 * GIB}) == {
        "GPU-b": 9 * GIB
    }


@pytest.mark.parametrize("has_gpu", [True, False])
def test_after_the_end_nothing_is_launched_and_without_a_gpu_nothing_is_waited_for(
    has_gpu: bool,
) -> None:
    readings = iter([{"GPU-a": 0}, *[{"GPU-a": 20 * GIB}] * 1000])
    made = GpuMemoryWait(
        lambda: next(readings) if has_gpu else None,
        50.0,
        SystemClock(),
        report=lambda _event: None,
        soon=lambda call: call(),
    )
    made.remember()
    proceeded = threading.Event()
    made.wait(proceeded.set)
    made.close()
    assert proceeded.wait(1.0) is not has_gpu
