"""The hook never gets in the way of training: without a disk, without a supervisor, after a fork,
in a hang, with a foreign signal, on an unusual exit."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miner_guard.rank import flight
from miner_guard.rank import guard as hook
from miner_guard.rank.console import Console
from miner_guard.rank.environment import RankSettings, find
from miner_guard.rank.guard import Guard
from miner_guard.record.events import Event, event
from miner_guard.state_dir import StateDir
from tests.support.waiting import until
from tests.unit.rank.helpers import Clock, entries, messages, place, reader_of, state_of


def test_no_memory_for_the_record_costs_the_record_and_not_the_training(
    state: StateDir, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", full)
    guard = Guard(place(state))
    guard.step(loss=1.0)
    assert guard.may_upload(outer_step=1, inner_step=50)
    guard.close(finished=True)
    records = [json.loads(listener.recv(65536)) for _ in range(2)]
    assert any("Cannot allocate memory" in m.get("fields", {}).get("what", "") for m in records)
    assert not state.flight.exists()


def test_a_disk_that_has_room_later_shows_the_record_from_its_first_step_on(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full at launch once cost the whole launch its record: there were no step
    lines, and a finished miner was restarted forever."""
    published = flight.publish

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(flight, "COPY_EVERY_S", 0.01)
    monkeypatch.setattr(flight, "publish", full)
    guard = Guard(place(state))
    for _ in range(3):
        guard.step(loss=1.0)
    guard.close(finished=True)
    monkeypatch.setattr(flight, "publish", published)
    until(lambda: (state.flight / "rank-0000.live").exists(), 10, "the record")
    assert len(list(reader_of(state).steps())) == 3
    assert state_of(state) == "finished"
    assert "No space left on device" in messages(state)[0]


def test_no_other_process_can_truncate_the_record(guard: Guard, state: StateDir) -> None:
    """SIGBUS killed any process that wrote to a mapped file after someone had truncated it."""
    with (state.flight / "rank-0000.live").open("r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    with pytest.raises(PermissionError):
        os.truncate(state.flight / "rank-0000.live", 4096)
    until(state.flight_of(0).exists, 10, "the copy")
    os.truncate(state.flight_of(0), 0)
    guard.step(loss=1.0)
    assert [s.loss for s in reader_of(state).steps()] == [1.0]


def test_a_missing_and_an_unwritable_state_directory_are_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    guard = Guard(place(StateDir(tmp_path / "file" / "state")))
    guard.step(loss=1.0)
    guard.close()
    assert guard.error_count == 1


def test_settings_that_are_not_json_are_reported_and_the_defaults_used(state: StateDir) -> None:
    guard = Guard(place(state, _MINER_GUARD_RANK_SETTINGS="{broken"))
    assert guard.place.settings == RankSettings()
    assert "settings from the supervisor" in messages(state)[0]


def test_close_says_how_it_ended(guard: Guard, state: StateDir) -> None:
    assert state_of(state) == "starting"
    guard.step()
    assert state_of(state) == "running"
    guard.close(finished=True)
    assert state_of(state) == "finished"
    guard.close()
    assert state_of(state) == "finished"


def test_close_in_a_finally_with_an_exception_in_flight_does_not_count_as_finished(
    guard: Guard, state: StateDir
) -> None:
    def train() -> None:
        try:
            raise RuntimeError("CUDA out of memory")
        finally:
            guard.close(finished=True)

    with pytest.raises(RuntimeError):
        train()
    assert state_of(state) == "closed"
    assert "not marked as finished" in messages(state)[0]


def test_the_rank_does_not_wait_for_a_stuck_reader_and_counts_drops(
    guard: Guard, state: StateDir, listener: socket.socket, clock: Clock
) -> None:
    for number in range(5000):
        clock.now += 1
        guard.step(inner_step=number)
    now = reader_of(state).now()
    assert now is not None
    assert now.total_steps == 5000
    assert now.dropped > 1000
    assert guard.supervised, "a slow reader is a reader"


def test_a_rank_whose_supervisor_dies_prints_its_own_events(
    state: StateDir, listener: socket.socket, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = Guard(place(state), clock)
    assert guard.supervised
    listener.close()
    clock.now += 10
    guard.step(outer_step=1, inner_step=1, loss=2.0)
    assert not guard.supervised
    guard.may_upload(outer_step=1, inner_step=15)
    guard.close()
    assert "UPLOAD BLOCKED: inner_step (15) < minimum (50)" in capfd.readouterr().out
    (entry,) = entries(state, "decision")
    assert entry["inner_step"] == 15, "the next supervisor reads it too"


def test_a_forked_child_does_not_write_into_its_parents_record(
    state: StateDir, listener: socket.socket
) -> None:
    script = (
        "import os, sys, miner_guard\n"
        "guard = miner_guard.init(sys.argv[1])\n"
        "guard.step(inner_step=1)\n"
        "if os.fork() == 0:\n"
        "    with guard.phase('data'): guard.step(inner_step=2)\n"
        "    guard.close(finished=True); os._exit(0)\n"
        "os.wait(); guard.step(inner_step=3)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(state.root)], check=True, timeout=60)
    assert [s.inner_step for s in reader_of(state).steps()] == [1, 3]
    assert state_of(state) == "ended", "the parent itself, at its exit"


def test_a_forked_child_logs_nothing_for_its_parent(state: StateDir) -> None:
    script = (
        "import os, sys, miner_guard\n"
        "from miner_guard.record.events import event\n"
        "guard = miner_guard.init(sys.argv[1])\n"
        "if os.fork() == 0:\n"
        "    guard.emit(event('rank_message', 'info', 'from the child', text='…'))\n"
        "    guard._recorder.say(event('rank_message', 'info', 'from the child', text='…'))\n"
        "    import time; time.sleep(0.3); os._exit(0)\n"
        "os.wait(); guard.emit(event('rank_message', 'info', 'from the rank', text='…'))\n"
        "guard.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(state.root)], check=True, timeout=60, capture_output=True
    )
    assert b"from the rank" in done.stdout
    assert b"from the child" not in done.stdout


def test_a_rank_without_home_or_working_directory_keeps_its_rank_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each rank would assume that it is rank 0 of 1, and upload on its own."""
    place = find({"RANK": "2", "WORLD_SIZE": "4"}, "~no-such-user/state")
    assert (place.rank, place.world_size, place.state) == (2, 4, None)
    assert "the state directory ~no-such-user/state can't be found" in place.remarks[0]

    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    nowhere = find({"RANK": "2", "WORLD_SIZE": "4"}, "state")
    assert (nowhere.rank, nowhere.state) == (2, None)


@pytest.mark.parametrize("text", ["-1", "two", str(1 << 40)])
def test_an_invalid_local_rank_is_reported_and_counts_as_0(state: StateDir, text: str) -> None:
    seen = find({"LOCAL_RANK": text}, state.root)
    assert seen.local_rank == 0
    assert f"LOCAL_RANK={text!r}" in seen.remarks[0]
    Guard(seen).close()
    assert reader_of(state).identity.local_rank == 0


def test_a_tensor_logged_by_mistake_is_not_fetched_from_the_gpu(
    guard: Guard, state: StateDir
) -> None:
    class Tensor:
        device = type("device", (), {"type": "cuda", "__str__": lambda _self: "cuda:0"})()

        def __repr__(self) -> str:
            raise AssertionError("this would have synchronised the GPU")

    guard.checkpoint_saved("step-7", step=Tensor())  # type: ignore[arg-type]
    (entry,) = entries(state, "checkpoint")
    assert entry["step"] == "Tensor on cuda"


def test_importing_and_using_the_hook_imports_neither_torch_nor_third_party_modules() -> None:
    script = (
        "import sys; before = set(sys.modules)\n"
        "import miner_guard; guard = miner_guard.init()\n"
        "assert 'miner_guard.uploads.gate' not in sys.modules, 'a question imports the rules'\n"
        "guard.step(loss=1.0); guard.may_upload(outer_step=1, inner_step=99); guard.close()\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "foreign = loaded - {'miner_guard'} - set(sys.stdlib_module_names)\n"
        "sys.exit(str(foreign) if foreign else 0)\n"
    )
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}"],
        check=True,
        timeout=60,
    )


def test_init_gives_the_same_guard_until_it_is_closed(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "_current", None)
    first = hook.begin(state.root)
    assert hook.begin() is first
    first.close()
    second = hook.begin(state.root)
    assert second is not first
    second.close()


def test_a_spawned_worker_that_runs_the_script_again_leaves_the_ranks_record_alone(
    state: StateDir, listener: socket.socket, tmp_path: Path
) -> None:
    """A dataloader's worker once replaced the record that its rank wrote to, which looked like a
    hang."""
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, sys, miner_guard\n"
        "guard = miner_guard.init(sys.argv[1])\n"
        "if __name__ == '__main__':\n"
        "    guard.step(inner_step=1)\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    worker.start(); worker.join()\n"
        "    assert worker.exitcode == 0\n"
        "    guard.step(inner_step=2)\n"
        "    guard.close(finished=True)\n"
    )
    subprocess.run([sys.executable, str(script), str(state.root)], check=True, timeout=60)
    assert [s.inner_step for s in reader_of(state).steps()] == [1, 2]
    assert state_of(state) == "finished"


def test_a_value_passed_by_mistake_is_reported_and_raises_nothing(
    guard: Guard, state: StateDir
) -> None:
    """A line that only logs something must not end the training."""
    circle: dict[str, object] = {}
    circle["itself"] = circle
    assert guard.journal(circle) is False
    assert guard.journal({(1, 2): 3}) is False
    guard.add_cost("eval", math.nan)
    guard.add_cost("eval", math.inf)
    nothing: Any = None
    with guard.upload(nothing) as upload:
        upload.tag = "5.56.84"
    with guard.track(nothing):
        pass
    for _ in range(200):
        guard.phase("data").__enter__()
    guard.step(loss=1.0)
    words = " ".join(messages(state))
    for part in (
        "guard.journal: ValueError",
        "guard.add_cost: ValueError: nan s for eval is not",
        "not a decision from may_upload",
    ):
        assert part in words
    assert "64 phases are open" in words
    assert len(guard._stepper.phases.stack) == 64


def test_neither_an_odd_event_nor_a_full_pipe_silences_a_rank_that_prints_for_itself() -> None:
    """An exception once ended the thread that writes, and logging stopped without notice."""

    class Odd:
        def __str__(self) -> str:
            raise ValueError("no text")

    read, write = os.pipe2(os.O_NONBLOCK)
    console = Console(0, write)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    console.say(
        event("rank_message", "info", "there is no room for this", text="there is no room for this")
    )
    console.flush()
    with contextlib.suppress(BlockingIOError):
        while os.read(read, 1 << 16):
            pass
    odd: Any = Odd()
    console.say(Event("no_such_event", "info", odd, {}))
    console.say(event("rank_message", "info", "for this there is", text="for this there is"))
    console.flush()
    printed = os.read(read, 1 << 16).decode()
    assert "for this there is" in printed
    assert "could not print 2 lines of this rank: no_such_event: ValueError" in printed
    console.detach_after_fork()
    os.close(read)
    os.close(write)


def test_without_a_standard_output_nothing_is_written_into_the_file_that_has_its_number(
    tmp_path: Path,
) -> None:
    script = (
        "import sys, miner_guard\n"
        "file = open(sys.argv[1], 'wb'); assert file.fileno() == 1\n"
        "guard = miner_guard.init(); guard.step(loss=1.0); guard.close()\n"
        "file.write(b'weights'); file.close()\n"
    )
    weights = tmp_path / "weights"
    command = f'exec "{sys.executable}" -c "$0" "$1" >&-'
    subprocess.run(["/bin/sh", "-c", command, script, str(weights)], check=True, timeout=60)
    assert weights.read_bytes() == b"weights"
