"""The hook inside a rank: records what happens, and never stands in training's way."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.clock import FakeClock
from miner_guard.costs.tracker import MonitoringCostTracker
from miner_guard.rank import hook, stacks
from miner_guard.rank.environment import Place, RankSettings, find
from miner_guard.rank.flight import FlightReader
from miner_guard.rank.hook import Guard
from miner_guard.rank.layout import FLAG_EVAL, FLAG_FIRST, FLAG_LOSS_ON_CPU, FLAG_SYNC, JOURNAL_SLOTS
from miner_guard.rank.stacks import STACKS_SIGNAL, SignalTaken
from miner_guard.statedir import StateDir


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


@pytest.fixture
def listener(state: StateDir) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(state.socket))
        yield server


@pytest.fixture
def guard(state: StateDir, listener: socket.socket, clock: Clock) -> Guard:
    return Guard(place(state), clock)


def place(state: StateDir | None, *, rank: int = 0, world_size: int = 1, **env: str) -> Place:
    return find({"RANK": str(rank), "WORLD_SIZE": str(world_size), **env}, state.root if state else None)


def reader_of(state: StateDir, rank: int = 0) -> FlightReader:
    return FlightReader(state.flight_of(rank), acknowledge=True)


def entries(state: StateDir, kind: str) -> list[dict[str, Any]]:
    return [e for _, e in reader_of(state).entries() if e["kind"] == kind]


def said(state: StateDir) -> list[str]:
    return [e["fields"]["what"] for e in entries(state, "finding") if e["event"] == "guard_degraded"]


def test_phases_are_inclusive_and_a_nested_one_is_not_counted_twice(
    guard: Guard, state: StateDir, clock: Clock
) -> None:
    with guard.phase("forward"):
        clock.now += 1
        with guard.phase("data"):
            clock.now += 2
        with guard.phase("forward"):
            clock.now += 4
    guard.step(outer_step=1, inner_step=7, loss=2.5, lr=1e-4, grad_norm=0.5, tokens=512)
    (step,) = reader_of(state).steps()
    assert step.phases == {"forward": 7.0, "data": 2.0}
    assert (step.inner_step, step.loss, step.lr, step.grad_norm, step.tokens) == (7, 2.5, 1e-4, 0.5, 512)
    assert step.seconds == 7.0
    assert step.flags & FLAG_FIRST


def test_a_gradient_norm_that_is_nan_is_not_one_that_was_not_given(guard: Guard, state: StateDir) -> None:
    guard.step(loss=2.5)
    guard.step(loss=2.5, grad_norm=math.nan)
    guard.step(loss=2.5, grad_norm=math.inf)
    unknown, nan, infinite = (step.grad_norm for step in reader_of(state).steps())
    assert unknown is None
    assert nan is not None
    assert math.isnan(nan)
    assert infinite == math.inf


def test_a_loss_shown_as_zero_beside_a_nan_gradient_norm_blocks_the_upload(guard: Guard) -> None:
    guard.step(outer_step=1, inner_step=49, loss=2.5, grad_norm=1.0)
    guard.step(outer_step=1, inner_step=50, loss=0.0, grad_norm=math.nan)
    decision = guard.may_upload(outer_step=1, inner_step=50)
    assert not decision
    assert "poisoned" in decision.reason


def test_monitor_knows_what_is_nested_in_it(guard: Guard, state: StateDir, clock: Clock) -> None:
    with guard.phase("monitor"):
        clock.now += 1
        with guard.phase("val_loss"):
            clock.now += 2
            with guard.phase("inference"):
                clock.now += 3
        with guard.phase("my own thing"):
            clock.now += 4
    guard.step()
    (step,) = reader_of(state).steps()
    assert step.phases == {"monitor": 10.0, "val_loss": 5.0, "inference": 3.0, "other": 4.0}
    assert step.nested_in_monitor_s == 9.0
    assert step.flags & FLAG_EVAL
    assert not step.flags & FLAG_SYNC


def test_a_phase_that_spans_two_steps_is_shared_between_them(guard: Guard, state: StateDir, clock: Clock) -> None:
    with guard.phase("upload"):
        clock.now += 5
        guard.step(inner_step=1)
        now = reader_of(state).now()
        assert now is not None
        assert (now.phase, now.phase_since) == ("upload", 1000.0)
        clock.now += 3
    guard.step(inner_step=2)
    assert [s.phases["upload"] for s in reader_of(state).steps()] == [5.0, 3.0]


def test_the_header_shows_the_innermost_phase_and_its_allowance(guard: Guard, state: StateDir, clock: Clock) -> None:
    def phase() -> tuple[str, float, float | None]:
        now = reader_of(state).now()
        assert now is not None
        return now.phase, now.phase_since, now.allowance_s

    with guard.phase("load_state", allowance_s=77.0):
        clock.now += 1
        with guard.phase("download"):
            assert phase() == ("download", 1001.0, None)
            clock.now += 1
        assert phase() == ("load_state", 1000.0, 77.0)
    assert phase() == ("", 1002.0, None)


def test_phases_of_a_background_thread_take_no_time_of_the_step(guard: Guard, state: StateDir, clock: Clock) -> None:
    def upload() -> None:
        with guard.phase("upload"):
            clock.now += 9

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join()
    guard.step()
    (step,) = reader_of(state).steps()
    assert step.phases == {}


def test_an_exception_passes_through_a_phase_and_leaves_no_phase_open(guard: Guard, state: StateDir) -> None:
    def fails() -> None:
        with guard.phase("forward"):
            guard.phase("data").__enter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    now = reader_of(state).now()
    assert now is not None
    assert now.phase == ""


class FakeTensor:
    """As much of a tensor as the hook may touch; its value can be told to be out of reach."""

    def __init__(self, device: str, value: float | None) -> None:
        self.device = type("device", (), {"type": device})()
        self._value = value

    def __float__(self) -> float:
        if self._value is None:
            raise AssertionError("this would have synchronised the GPU")
        return self._value


def test_a_loss_on_the_gpu_is_not_read_but_said_once(guard: Guard, state: StateDir) -> None:
    for _ in range(3):
        guard.step(loss=FakeTensor("cuda", None))
    assert [(s.loss, s.loss_given) for s in reader_of(state).steps()] == [(None, False)] * 3
    assert len(said(state)) == 1
    assert "synchronisation; pass a float" in said(state)[0]


def test_a_sharded_loss_is_not_read_because_that_is_a_collective(guard: Guard, state: StateDir) -> None:
    tensor = FakeTensor("cpu", None)
    tensor.to_local = None  # type: ignore[attr-defined]
    guard.step(grad_norm=tensor, loss=1.0)
    (step,) = reader_of(state).steps()
    assert (step.loss, step.grad_norm) == (1.0, None)
    assert "needs a collective" in said(state)[0]


@pytest.mark.parametrize(("expect", "flagged"), [(1, True), (0, False), ("auto", False)])
def test_a_loss_on_the_cpu_is_evidence_where_cuda_is_expected(
    state: StateDir, clock: Clock, expect: object, flagged: bool
) -> None:
    settings = json.dumps({"gpu": {"expect": expect, "of a newer version": 1}})
    guard = Guard(place(state, _MINER_GUARD_RANK_SETTINGS=settings), clock)
    guard.step(loss=FakeTensor("cpu", 1.5))
    (step,) = reader_of(state).steps()
    assert step.loss == 1.5
    assert bool(step.flags & FLAG_LOSS_ON_CPU) == flagged


def test_a_nan_loss_is_a_loss_and_an_unknown_one_is_not(guard: Guard, state: StateDir) -> None:
    guard.step(loss=math.nan)
    guard.step()
    first, second = reader_of(state).steps()
    assert first.loss is not None
    assert math.isnan(first.loss)
    assert second.loss is None
    assert second.inner_step is None


@pytest.mark.parametrize(
    "arguments",
    [{"inner_step": "many"}, {"loss": "low"}, {"lr": object()}, {"tokens": [1]}, {"no such argument": 1}],
)
def test_nonsense_is_reported_and_never_raised(guard: Guard, state: StateDir, arguments: dict[str, Any]) -> None:
    guard.step(**arguments)
    guard.step(**arguments)
    guard.step(loss=1.0)
    assert len(said(state)) == 1
    assert guard.troubles == 2
    assert [s.loss for s in reader_of(state).steps()][-1] == 1.0


def test_a_full_disk_at_the_start_costs_the_record_and_not_the_training(
    state: StateDir, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    guard = Guard(place(state))
    guard.step(loss=1.0)
    assert guard.may_upload(outer_step=1, inner_step=50)
    guard.close(finished=True)
    messages = [json.loads(listener.recv(65536)) for _ in range(2)]
    assert any("No space left" in m.get("fields", {}).get("what", "") for m in messages)
    assert not list(state.flight.iterdir())


def test_a_missing_and_an_unwritable_state_directory_are_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    guard = Guard(place(StateDir(tmp_path / "file" / "state")))
    guard.step(loss=1.0)
    guard.close()
    assert guard.troubles == 1


def test_settings_that_are_not_json_are_said_and_the_defaults_used(state: StateDir) -> None:
    guard = Guard(place(state, _MINER_GUARD_RANK_SETTINGS="{broken"))
    assert guard.place.settings == RankSettings()
    assert "settings from the supervisor" in said(state)[0]


def test_broken_gate_inputs_make_the_repo_unknown_and_block_nothing(guard: Guard, state: StateDir) -> None:
    state.gate_inputs.write_text('{"published": {"age_s":')
    decision = guard.may_upload(outer_step=1, inner_step=50)
    assert decision.allowed
    assert "torn or not JSON" in decision.reason


def test_an_early_upload_is_blocked_in_the_documents_words(guard: Guard, state: StateDir) -> None:
    decision = guard.may_upload(outer_step=1, inner_step=15)
    assert not decision
    assert decision.reason == (
        "inner_step (15) < minimum (50). Validators will reject this! Waiting for more training steps..."
    )
    (entry,) = entries(state, "decision")
    assert (entry["allowed"], entry["upload_kind"], entry["decision_id"]) == (False, "gradient", decision.decision_id)
    assert guard.may_upload(outer_step=1, inner_step=0, kind="archive")


def test_an_error_in_the_rules_blocks_and_says_so(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("limit")

    monkeypatch.setattr("uploads.gate.decide", broken)
    decision = guard.may_upload(outer_step=1, inner_step=99)
    assert not decision
    assert "the gate failed: KeyError: 'limit'" in decision.reason


def test_ranks_without_a_process_group_cannot_agree_and_block(state: StateDir) -> None:
    guard = Guard(place(state, world_size=4))
    decision = guard.may_upload(outer_step=1, inner_step=99)
    assert not decision
    assert "torch.distributed is not initialised" in decision.reason
    assert guard.upload_due() is False


def test_an_upload_leaves_its_start_its_end_and_its_error(guard: Guard, state: StateDir, clock: Clock) -> None:
    decision = guard.may_upload(outer_step=1, inner_step=50)
    with guard.upload(decision) as upload:
        clock.now += 3
        upload.tag, upload.size_bytes = "5.1.50", 1000
    with pytest.raises(ConnectionError), guard.upload(decision):
        raise ConnectionError("storage is gone")
    first, second, _, failed = entries(state, "upload")
    assert (first["phase"], first["seconds"]) == ("started", None)
    assert (second["phase"], second["seconds"], second["tag"], second["bytes"]) == ("finished", 3.0, "5.1.50", 1000)
    assert (failed["phase"], failed["error"]) == ("failed", "ConnectionError: storage is gone")
    assert {e["decision_id"] for e in entries(state, "upload")} == {decision.decision_id}


def test_an_upload_is_due_once_the_published_state_is_past_its_target(
    guard: Guard, state: StateDir, clock: Clock
) -> None:
    def published(age_s: float) -> None:
        document = {"published": {"age_s": age_s, "reason": None, "seen_at": clock.now}, "written_monotonic": clock.now}
        state.gate_inputs.write_text(json.dumps(document))

    published(100.0)
    assert guard.upload_due() is False
    published(1801.0)
    assert guard.upload_due() is False, "asked once a step, so that all ranks have the same answer"
    guard.step()
    assert guard.upload_due() is True


def test_an_upload_that_has_just_ended_well_is_not_due_again_before_the_next_look_at_the_repo(
    guard: Guard, state: StateDir, clock: Clock
) -> None:
    def published(age_s: float) -> None:
        document = {"published": {"age_s": age_s, "reason": None, "seen_at": clock.now}, "written_monotonic": clock.now}
        state.gate_inputs.write_text(json.dumps(document))

    def due() -> bool:
        guard.step()
        return guard.upload_due()

    published(1801.0)
    decision = guard.may_upload(outer_step=1, inner_step=50)
    with guard.upload(decision) as upload:
        upload.error = "403 Forbidden"
    assert due(), "one that failed changes nothing"
    with guard.upload(decision):
        clock.now += 20
    assert not due()
    clock.now += 15
    published(1836.0)
    assert due(), "the repo does not show it: what was looked at counts"


def test_due_is_what_rank_0s_tracker_says_and_never_raises(
    guard: Guard, state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = MonitoringCostTracker(clock=FakeClock())
    monkeypatch.setattr("miner_guard.costs.tracker._global", own)
    answers = []
    for _ in range(6):
        guard.step()
        answers.append(guard.due("snapshot", every_steps=3))
    assert answers == [False, False, True, False, False, True]
    assert guard.due("snapshot") is False
    assert any("needs every_s or every_steps" in what for what in said(state))


def test_a_requested_checkpoint_is_seen_once(guard: Guard, state: StateDir) -> None:
    assert guard.checkpoint_requested() is False
    reader_of(state).request_checkpoint()
    guard.step()
    assert guard.checkpoint_requested() is True
    assert guard.checkpoint_requested() is False
    guard.step()
    assert guard.checkpoint_requested() is False


def state_of(state: StateDir) -> str:
    now = reader_of(state).now()
    assert now is not None
    return now.state


def test_close_says_how_it_ended(guard: Guard, state: StateDir) -> None:
    assert state_of(state) == "starting"
    guard.step()
    assert state_of(state) == "running"
    guard.close(finished=True)
    assert state_of(state) == "finished"
    guard.close()
    assert state_of(state) == "finished"


def test_close_in_a_finally_with_an_exception_in_flight_is_no_finish(guard: Guard, state: StateDir) -> None:
    def train() -> None:
        try:
            raise RuntimeError("CUDA out of memory")
        finally:
            guard.close(finished=True)

    with pytest.raises(RuntimeError):
        train()
    assert state_of(state) == "closed"
    assert "is not a finish" in said(state)[0]


def test_costs_are_summed_up_and_leave_room_for_decisions(guard: Guard, state: StateDir, clock: Clock) -> None:
    for _ in range(1000):
        guard.add_cost("eval", 0.5)
        clock.now += 11
    with guard.track("plot"):
        clock.now += 2
    guard.close()
    seen = entries(state, "cost")
    assert len(seen) <= JOURNAL_SLOTS // 2
    assert {(e["operation"], e["blocking"]) for e in seen} == {("eval", True)}
    reader_of(state).acknowledge(len(seen))
    guard._costs.flush()
    more = entries(state, "cost")[len(seen) :]
    assert sum(e["seconds"] for e in (*seen, *more) if e["operation"] == "eval") == 500.0
    assert [e["seconds"] for e in more if e["operation"] == "plot"] == [2.0]


def test_a_stuck_reader_is_not_waited_for_and_drops_are_counted(
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


def test_a_supervisor_that_dies_leaves_the_rank_logging_for_itself(
    state: StateDir, listener: socket.socket, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = Guard(place(state), clock)
    assert guard.supervised
    listener.close()
    clock.now += 10
    guard.step(outer_step=1, inner_step=1, loss=2.0)
    assert not guard.supervised
    clock.now += 70
    guard.step(outer_step=1, inner_step=2, loss=math.nan)
    guard.may_upload(outer_step=1, inner_step=15)
    guard.close()
    lines = [json.loads(line) for line in state.log.read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "inner_step", "inner_step", "slow_step", "loss_nan", "upload_blocked",
    ]  # fmt: skip
    console = capfd.readouterr().out
    assert "SLOW STEP: 70.0s (expected 10-30s) - Check GPU usage!" in console
    assert "CRITICAL ERROR | Rank 0 | ❌ Loss is NaN or Inf at step 2" in console


def test_a_long_path_of_the_state_directory_still_reaches_the_supervisor(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    short = tmp_path / "short"
    short.symlink_to(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(short / "guard.sock"))
        server.settimeout(5)
        Guard(place(StateDir(folder)))
        assert server.recv(100) == b'{"bell": 0}'


def test_a_forked_child_does_not_write_into_its_parents_record(state: StateDir, listener: socket.socket) -> None:
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
    assert state_of(state) == "running"


def test_a_rank_that_hangs_in_c_code_still_gives_its_stacks(state: StateDir, listener: socket.socket) -> None:
    script = (
        "import sys, threading, miner_guard\n"
        "guard = miner_guard.init(sys.argv[1])\n"
        "lock = threading.Lock(); lock.acquire()\n"
        "def waits_for_ever():\n"
        "    print('there', flush=True); lock.acquire()\n"
        "waits_for_ever()\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", script, str(state.root)], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"there\n"
        file = state.stacks_of(0)
        assert file.read_bytes() == b"pid %d\n" % rank.pid
        rank.send_signal(STACKS_SIGNAL)
        deadline = time.monotonic() + 30
        while b"waits_for_ever" not in file.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert rank.poll() is None
    finally:
        rank.kill()
        rank.communicate()


def test_a_signal_that_the_program_uses_itself_is_left_alone(state: StateDir, listener: socket.socket) -> None:
    before = signal.signal(STACKS_SIGNAL, lambda *_: None)
    try:
        with pytest.raises(SignalTaken):
            stacks.register(state.root / "stacks")
    finally:
        signal.signal(STACKS_SIGNAL, before)


def test_importing_and_using_the_hook_imports_neither_torch_nor_third_party_modules() -> None:
    script = (
        "import sys; before = set(sys.modules)\n"
        "import miner_guard; guard = miner_guard.init()\n"
        "guard.step(loss=1.0); guard.may_upload(outer_step=1, inner_step=99); guard.close()\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "foreign = loaded - {'miner_guard', 'uploads', 'validators'} - set(sys.stdlib_module_names)\n"
        "sys.exit(str(foreign) if foreign else 0)\n"
    )
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}"], check=True, timeout=60
    )


def test_init_gives_the_same_guard_until_it_is_closed(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_current", None)
    first = hook.init(state.root)
    assert hook.init() is first
    first.close()
    assert hook.init(state.root) is not first
