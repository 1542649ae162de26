"""The hook never gets in the way of training: without memory, without a disk, without a guard,
after a fork, in a hang, with a foreign signal, on an unusual exit."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miner_guard.rank import dumps
from miner_guard.rank import guard as hook
from miner_guard.rank.console import Console
from miner_guard.rank.environment import RankSettings, find
from miner_guard.rank.guard import Guard
from miner_guard.record.events import Event, event
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks
from tests.unit.rank.helpers import Clock, place


def run(state: StateDir, ranks: Ranks | None, script: str, *arguments: str) -> str:
    """Run a script that begins with `guard`, a rank's hook; returns what it prints."""
    begin = "import os, sys, miner_guard\nguard = miner_guard.init(sys.argv[1])\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + script, str(state.root), *arguments],
        env={**os.environ, **({} if ranks is None else ranks.env)},
        check=True,
        timeout=60,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def test_no_memory_for_the_record_costs_the_record_and_not_the_training(
    state: StateDir,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    guard = Guard(place(state, ranks))
    guard.step(loss=1.0)
    assert guard.may_upload(outer_step=1, inner_step=50)
    guard.close(finished=True)
    assert ranks.connected == []
    assert "no shared memory for the record of rank 0: [Errno 12]" in capfd.readouterr().out


def test_a_state_directory_that_cannot_be_written_costs_no_step(
    tmp_path: Path, ranks: Ranks
) -> None:
    (tmp_path / "file").write_text("in the way")
    guard = Guard(place(StateDir(tmp_path / "file" / "state"), ranks))
    guard._begin(agree=False)
    guard.step(loss=1.0)
    guard.close(finished=True)
    assert [step.loss for step in ranks.steps()] == [1.0]
    assert ranks.now().state == "finished"
    (words,) = ranks.messages()
    assert "guard.stacks: FileExistsError" in words


@pytest.mark.parametrize("wire", ["", "nobody-listens-here token"])
def test_a_rank_without_a_guard_prints_its_own_events(
    state: StateDir, capfd: pytest.CaptureFixture[str], wire: str
) -> None:
    guard = Guard(place(state, _MINER_GUARD_WIRE=wire))
    guard.step(loss=1.0)
    assert not guard.supervised
    guard.may_upload(outer_step=1, inner_step=15)
    guard.close()
    assert "UPLOAD BLOCKED: inner_step (15) < minimum (50)" in capfd.readouterr().out


def test_a_rank_in_another_network_namespace_connects_by_path(
    state: StateDir, ranks: Ranks
) -> None:
    close = ranks.wire.open_path(state.socket)
    token = ranks.wire.address.partition(" ")[2]
    guard = Guard(place(state, _MINER_GUARD_WIRE=f"no-such-name {token}"))
    guard.step(loss=1.0)
    assert guard.supervised
    assert [step.loss for step in ranks.steps()] == [1.0]
    close()


def test_a_rank_whose_guard_dies_prints_its_own_events_until_one_listens_again(
    state: StateDir, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    close = ranks.wire.open_path(state.socket)
    guard = Guard(place(state, ranks))
    assert ranks.connected == [0]
    ranks.callers.pop().connection.close()
    close()
    ranks.wire._listener.close()
    guard._recorder.ring()
    assert not guard.supervised
    guard.may_upload(outer_step=1, inner_step=15)
    guard.close()
    assert "UPLOAD BLOCKED: inner_step (15) < minimum (50)" in capfd.readouterr().out
    ranks.wire.open_path(state.socket)
    assert guard._recorder.wire is not None
    guard._recorder.wire._tried_at = -math.inf
    guard._recorder.ring()
    (entry,) = ranks.decisions()
    assert entry["inner_step"] == 15


def test_the_rank_does_not_wait_for_a_guard_that_does_not_read(
    guard: Guard, ranks: Ranks, clock: Clock
) -> None:
    for number in range(20_000):
        clock.now += 1
        guard.step(inner_step=number)
    assert guard.supervised, "a slow reader is a reader"
    assert ranks.now().total_steps == 20_000
    assert [s.inner_step for s in ranks.steps()] == list(range(20_000 - 4096, 20_000))


def test_settings_that_are_not_json_are_reported_and_the_defaults_used(
    state: StateDir, ranks: Ranks
) -> None:
    guard = Guard(place(state, ranks, _MINER_GUARD_RANK_SETTINGS="{broken"))
    assert guard.place.settings == RankSettings()
    assert "settings from the supervisor" in ranks.messages()[0]


def test_close_says_how_it_ended(guard: Guard, ranks: Ranks) -> None:
    assert ranks.now().state == "starting"
    guard.step()
    assert ranks.now().state == "running"
    for _ in range(2):
        guard.close(finished=True)
        assert ranks.now().state == "finished"


def test_close_in_a_finally_with_an_exception_in_flight_does_not_count_as_finished(
    guard: Guard, ranks: Ranks
) -> None:
    def train() -> None:
        try:
            raise RuntimeError("CUDA out of memory")
        finally:
            guard.close(finished=True)

    with pytest.raises(RuntimeError):
        train()
    assert ranks.now().state == "closed"
    assert "not marked as finished" in ranks.messages()[0]


def test_a_forked_child_neither_writes_nor_logs_for_its_parent(
    state: StateDir, ranks: Ranks
) -> None:
    script = (
        "from miner_guard.record.events import event\n"
        "guard.step(inner_step=1)\n"
        "if os.fork() == 0:\n"
        "    with guard.phase('data'): guard.step(inner_step=2)\n"
        "    guard.emit(event('rank_message', 'info', 'from the child', text='…'))\n"
        "    guard.close(finished=True); os._exit(0)\n"
        "os.wait(); guard.step(inner_step=3)\n"
        "guard.emit(event('rank_message', 'info', 'from the rank', text='…'))\n"
    )
    assert run(state, ranks, script) == ""
    assert [step.inner_step for step in ranks.steps()] == [1, 3]
    assert [entry["text"] for entry in ranks.entries("event")] == ["from the rank"]
    assert ranks.now().state == "ended", "the parent itself, at its exit"
    printed = run(state, None, script)
    assert "from the rank" in printed
    assert "from the child" not in printed


def test_a_rank_without_home_or_working_directory_keeps_its_rank_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise each rank would assume that it is rank 0 of 1, and upload on its own."""
    place = find({"RANK": "2", "WORLD_SIZE": "4"}, "~no-such-user/state")
    assert (place.rank, place.world_size, place.state) == (2, 4, None)
    assert "the state directory ~no-such-user/state can't be found" in place.remarks[0]
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    nowhere = find({"RANK": "2", "WORLD_SIZE": "4"}, "state")
    assert (nowhere.rank, nowhere.state) == (2, None)


@pytest.mark.parametrize("text", ["-1", "two", str(1 << 40)])
def test_an_invalid_local_rank_is_reported_and_counts_as_0(ranks: Ranks, text: str) -> None:
    where = place(None, ranks, LOCAL_RANK=text)
    assert f"LOCAL_RANK={text!r}" in where.remarks[0]
    Guard(where)
    assert ranks.reader().identity.local_rank == 0


def test_a_tensor_logged_by_mistake_is_not_fetched_from_the_gpu(guard: Guard, ranks: Ranks) -> None:
    class Tensor:
        device = type("device", (), {"type": "cuda", "__str__": lambda _self: "cuda:0"})()

        def __repr__(self) -> str:
            raise AssertionError("this would have synchronised the GPU")

    guard.checkpoint_saved("step-7", step=Tensor())  # type: ignore[arg-type]
    (entry,) = ranks.entries("checkpoint")
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


def test_a_module_that_another_thread_is_importing_counts_as_not_imported(
    guard: Guard, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a module is in `sys.modules` without most of its attributes. Three of four ranks once
    died of `partially initialized module 'torch.compiler' has no attribute 'is_compiling'`."""
    for name in ("compiler", "cuda", "distributed", "_C._distributed_c10d"):
        module = ModuleType(f"torch.{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__spec__._initializing = True  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with guard.phase("forward"):
        pass
    guard.step(inner_step=1)
    with pytest.raises(LookupError, match="has not imported"):
        dumps._last_collectives()
    assert [step.inner_step for step in ranks.steps()] == [1]
    assert ranks.messages() == []


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
    state: StateDir, ranks: Ranks, tmp_path: Path
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
        "    guard.step(inner_step=2)\n"
        "    guard.close(finished=True)\n"
    )
    command = [sys.executable, str(script), str(state.root)]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, **ranks.env})
    assert [step.inner_step for step in ranks.steps()] == [1, 2]
    assert len(ranks.callers) == 1
    assert ranks.now().state == "finished"


def test_a_value_passed_by_mistake_is_reported_and_raises_nothing(
    guard: Guard, ranks: Ranks
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
    words = " ".join(ranks.messages())
    for part in (
        "guard.journal: ValueError",
        "guard.add_cost: ValueError: nan s for eval is not",
        "not a decision from may_upload",
    ):
        assert part in words
    assert "64 phases are open" in words
    assert len(guard._stepper.phases.stack) == 64


def test_neither_an_odd_event_nor_a_full_pipe_silences_a_rank_that_prints_for_itself() -> None:
    """An exception once ended the printing, and logging stopped without notice."""

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
    with contextlib.suppress(BlockingIOError):
        while os.read(read, 1 << 16):
            pass
    odd: Any = Odd()
    console.say(Event("no_such_event", "info", odd, {}))
    console.say(event("rank_message", "info", "for this there is", text="for this there is"))
    printed = os.read(read, 1 << 16).decode()
    assert "for this there is" in printed
    assert "could not print 1 line of this rank: the pipe was full" in printed
    assert "could not print no_such_event: ValueError" in printed
    os.close(read)
    os.close(write)


PRINTING = """
import os, sys, miner_guard
from miner_guard.record.events import event
way, weights = sys.argv[1:]
if way == "closed":
    assert os.open(weights, os.O_WRONLY) == 1
guard = miner_guard.init()
if way == "replaced":
    os.dup2(os.open(weights, os.O_WRONLY), 1)
guard.emit(event("rank_message", "info", "no guard listens", text="…"))
guard.close()
"""


@pytest.mark.parametrize("way", ["same", "replaced", "closed"])
def test_a_rank_prints_into_no_file_that_has_the_number_of_its_standard_output(
    tmp_path: Path, way: str
) -> None:
    """A program without a standard output, or one that closes it, may use its number for one of
    its files."""
    weights = tmp_path / "weights"
    weights.touch()
    close = ">&-" if way == "closed" else ""
    shell = ["/bin/sh", "-c", f'exec "$0" -c "$1" {way} "$2" {close}']
    command = [*shell, sys.executable, PRINTING, str(weights)]
    done = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE)
    assert (b"no guard listens" in done.stdout) == (way != "closed")
    assert weights.read_bytes() == b""


class Reentrant(Clock):
    """A clock that records a step whenever it is read, a thousand times at most."""

    calls = 0
    guard: Guard | None = None

    def __call__(self) -> float:
        self.calls += 1
        if self.guard is not None and self.calls < 1000:
            self.guard.step(inner_step=1)
            with self.guard.phase("forward"):
                pass
        return super().__call__()


def test_a_clock_of_the_program_that_calls_the_hook_does_not_hang_the_training(
    state: StateDir, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls() -> int:
        clock = Reentrant()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", clock)
            clock.guard = guard = Guard(place(state, ranks), clock)
            guard.step(inner_step=2)
        clock.guard = None
        guard.close()
        return clock.calls

    assert calls() < 100
    for module in ("guard", "steps"):
        monkeypatch.setattr(f"miner_guard.rank.{module}.without_reentry", lambda clock: clock)
    assert calls() >= 1000, "the attack works"
