"""The supervisor's states when events arrive in the wrong order, or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from miner_guard.config import Config, HangSettings
from miner_guard.guard.engines import RestartsInPlace
from miner_guard.guard.keeper_client import Ending, Hello, KeptMiner
from miner_guard.guard.loop import Loop
from miner_guard.guard.states import LaunchSpec, State, StopRequest, Then
from miner_guard.guard.supervisor import Supervisor
from miner_guard.rank.layout import Identity, Now
from miner_guard.record.events import Event
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Launch
from miner_guard.watch.hang import HangMonitor
from miner_guard.watch.runner import MonitorRunner
from tests.support.contexts import JobsLater, Steered, context


@pytest.fixture
def events() -> list[Event]:
    return []


class Keeper:
    """A keeper that can't launch anything, and that keeps no miner but the test's."""

    hello = Hello(1)
    dropped_bytes = unchecked = 0
    stuck = False

    def __init__(self) -> None:
        self.miner: KeptMiner | None = None

    def launch(self, _request: object) -> KeptMiner:
        raise OSError(24, "Too many open files")

    def stop(self, grace_s: float) -> None:
        assert self.miner is not None
        self.miner.kill_at = time.monotonic() + grace_s + 2.0

    def save(self, **values: object) -> None:
        self.hello = replace(self.hello, saved={**self.hello.saved, **values})

    def concluded(self) -> None: ...


def end(miner: KeptMiner, code: int, **how: Any) -> None:
    """The keeper reports the miner's end."""
    miner.exit = miner.ended = Ending(code, **how)


def finite(value: bool) -> Config:
    return replace(Config(), miner=replace(Config().miner, finite=value))


class Records:
    """Flight records whose queries fail when the test says so."""

    def __init__(self) -> None:
        self.failing = False
        self.saved: bool | None = None

    def launched(self, _launch: int) -> None: ...

    def adopt(self, _held: object) -> None: ...

    def poll(self, *, last: bool = False) -> None:
        if self.failing:
            raise ValueError("cannot convert float NaN to integer")

    def identities(self) -> dict[int, Any]:
        return {}

    def has_saved(self) -> bool | None:
        return self.saved

    def ask_checkpoint(self) -> int:
        self.saved = False
        return 1

    def all_in(self, _states: object) -> bool:
        self.poll()
        return False

    def headers(self) -> dict[int, Now]:
        self.poll()
        return {}


@pytest.fixture
def defects() -> list[Exception]:
    return []


@pytest.fixture
def supervisor(
    tmp_path: Path, events: list[Event], defects: list[Exception]
) -> Iterator[Supervisor]:
    """A supervisor without a miner: its keeper can't launch, so every launch fails immediately."""
    clock = FakeClock()
    loop = Loop(clock, defects.append)
    order = LaunchSpec(
        ("true",), lambda _launch: dict(os.environ), Config(), StateDir(tmp_path), "r1"
    )
    yield Supervisor(
        order,
        clock,
        loop,
        runner=MonitorRunner(events.append),
        keeper=cast(Any, Keeper()),
        flights=cast(Any, Records()),
    )
    loop.close()


@pytest.fixture
def miner(supervisor: Supervisor) -> KeptMiner:
    """A running launch."""
    now = supervisor.clock.monotonic()
    miner = KeptMiner({"pid": 2**22 + 1, "start": 1, "attempt": 0, "at": now})
    cast(Any, supervisor.keeper).miner = miner
    supervisor.launch = miner
    supervisor.state = State.RUNNING
    return miner


def test_a_restart_meant_for_a_launch_that_has_ended_does_not_cut_the_wait_short(
    supervisor: Supervisor, events: list[Event]
) -> None:
    """The hang watchdog once requested a restart although its miner had already given up on its own
    and the next start was pending."""
    supervisor._first_launch()
    assert [event.name for event in events] == ["miner_exited", "miner_restarting"]
    assert "Too many open files" in events[0].fields["how"]
    supervisor.request_stop(StopRequest("hang: rank 0 in data for 912s", Then.RESTART))
    supervisor.step()
    assert (supervisor.state, len(events)) == (State.WAITING, 2)


def test_the_guard_stops_even_if_sigkill_does_not_end_the_launcher(
    supervisor: Supervisor, miner: KeptMiner, events: list[Event]
) -> None:
    """A process in D state is never reaped, so the guard would never finish stopping."""
    supervisor.request_stop(StopRequest("SIGTERM", Then.STOP))
    supervisor.step()
    end(miner, 137, stuck=[(miner.pid, "it is blocked in the kernel (D state)")])
    for _ in range(2):
        supervisor.step()
    assert (supervisor.state, supervisor.exit_code) == (State.DONE, 0)
    assert supervisor.last_exit is not None
    assert supervisor.last_exit.code == 137
    assert any("D state" in each.text for each in events)
    assert "miner_exited" not in [each.name for each in events], "it has not"


def test_a_repeated_stop_request_reports_what_it_waits_for(
    supervisor: Supervisor, miner: KeptMiner, events: list[Event]
) -> None:
    """If a second Ctrl-C were swallowed for 45 s, the operator would send the guard SIGKILL
    next."""
    supervisor.request_stop(StopRequest("SIGINT", Then.STOP))
    supervisor.step()
    assert supervisor.state is State.STOPPING
    miner.kill_at = supervisor.clock.monotonic() + 32.0
    events.clear()
    for _ in range(3):
        supervisor.request_stop(StopRequest("SIGINT", Then.STOP))
    supervisor.step()
    assert [event.text for event in events] == [
        "MINER STOPPING: SIGINT, and it is already stopping, 32s to stop"
    ]


@pytest.mark.parametrize("what", ["saved", "took too long", "asked twice", "ended"])
def test_a_stop_waits_for_a_checkpoint_of_ranks_that_look_for_requests(
    supervisor: Supervisor, miner: KeptMiner, events: list[Event], what: str
) -> None:
    """An orderly stop at step 71 once resumed at step 50: SIGTERM ends most ranks at once."""
    records = cast(Any, supervisor.flights)
    records.saved = True
    supervisor.request_stop(StopRequest("SIGTERM", Then.STOP))
    for _ in range(3):
        supervisor.step()
    assert supervisor.state is State.STOPPING
    assert "MINER STOPPING: SIGTERM, after a checkpoint, 45s to stop" in events[-1].text
    assert miner.kill_at is None, "SIGTERM was sent before the ranks had saved"
    if what == "saved":
        records.saved = True
    elif what == "took too long":
        cast(FakeClock, supervisor.clock).advance(22.6)
    elif what == "asked twice":
        supervisor.request_stop(StopRequest("SIGTERM", Then.STOP))
    else:
        records.saved = None
    supervisor.step()
    assert miner.kill_at is not None
    end(miner, 0)
    supervisor.step()
    assert supervisor.exit_code == 0


@pytest.mark.parametrize(
    ("then", "code", "saved"),
    [(Then.STOP, 75, True), (Then.RESTART, 0, True), (Then.STOP, 0, None)],
    ids=["a hang ends the run", "a hang restarts the miner", "nobody looks for requests"],
)
def test_a_stop_does_not_wait_for_ranks_that_cannot_save(
    supervisor: Supervisor, miner: KeptMiner, then: Then, code: int, saved: bool | None
) -> None:
    cast(Any, supervisor.flights).saved = saved
    supervisor.request_stop(StopRequest("hang", then, code))
    supervisor.step()
    assert miner.kill_at is not None


def test_a_stop_during_a_restart_is_heard(
    supervisor: Supervisor, miner: KeptMiner, events: list[Event]
) -> None:
    """A first Ctrl-C must not go unanswered because the guard is already ending the launch for a
    restart."""
    supervisor.request_stop(StopRequest("hang: rank 0 in data", Then.RESTART))
    supervisor.step()
    events.clear()
    supervisor.request_stop(StopRequest("SIGTERM", Then.STOP))
    supervisor.step()
    assert [event.name for event in events] == ["miner_stopping"]
    end(miner, 0)
    supervisor.step()
    assert (supervisor.state, supervisor.reason) == (State.DONE, "SIGTERM")


def successor_of(supervisor: Supervisor) -> Supervisor:
    """The supervisor of the next guard, after this one's was killed."""
    keeper = cast(Any, supervisor.keeper)
    keeper.hello = replace(keeper.hello, last_guard={"pid": 1, "how": "signal SIGKILL"})
    later = Supervisor(
        supervisor.spec,
        supervisor.clock,
        supervisor.loop,
        runner=supervisor.runner,
        keeper=keeper,
        flights=supervisor.flights,
    )
    later._take_over()
    return later


def test_finished_work_is_not_run_again_when_the_guard_dies_before_it_exits(
    supervisor: Supervisor, miner: KeptMiner, events: list[Event]
) -> None:
    """A guard sends its last alerts for seconds after the miner has finished."""
    supervisor.spec = replace(supervisor.spec, config=finite(True))
    end(miner, 0)
    supervisor.step()
    cast(Any, supervisor.keeper).miner = None
    later = successor_of(supervisor)
    assert (later.exit_code, later.reason) == (0, "the miner finished its work")
    assert [event.name for event in events] == ["miner_finished"]


def test_the_next_guard_launches_with_the_command_that_this_one_was_told_to_use(
    supervisor: Supervisor,
) -> None:
    """A larger batch was lost when the guard was replaced."""
    supervisor.use_command(["torchrun", "train.py", "--batch=8"])
    supervisor.loop.drain()
    original = replace(supervisor.spec, command=("torchrun", "train.py", "--batch=4"))
    supervisor.spec = original
    assert successor_of(supervisor).spec.command == ("torchrun", "train.py", "--batch=8")


@pytest.mark.parametrize("asked", [True, False])
def test_the_end_of_a_launch_survives_whatever_fails_in_it(
    supervisor: Supervisor,
    miner: KeptMiner,
    events: list[Event],
    defects: list[Exception],
    asked: bool,
) -> None:
    """A NaN in a ring record once left the state at `ending` forever, and every later SIGTERM went
    unheard."""
    cast(Any, supervisor.flights).failing = True
    if asked:
        supervisor.request_stop(StopRequest("SIGTERM", Then.STOP))
        supervisor.step()
    end(miner, 3)
    supervisor.step()
    assert supervisor.state is (State.DONE if asked else State.WAITING)
    assert "miner_exited" in [event.name for event in events]
    assert defects


def test_a_stop_is_honoured_after_a_failure_while_it_was_begun(
    supervisor: Supervisor, miner: KeptMiner, defects: list[Exception]
) -> None:
    """A stop request must not be lost when the step that handles it fails."""

    def fail() -> None:
        raise RuntimeError("a defect")

    supervisor.on_stopping = fail
    supervisor.request_stop(StopRequest("SIGTERM", Then.STOP))
    supervisor.step()
    end(miner, 0)
    supervisor.step()
    assert supervisor.state is State.DONE
    assert [str(error) for error in defects] == ["a defect"]


def test_a_wait_for_gpu_memory_that_fails_does_not_keep_the_next_launch(
    supervisor: Supervisor, miner: KeptMiner
) -> None:
    """The guard must not wait forever for a probe that failed."""

    def fail(_proceed: object) -> None:
        raise RuntimeError("a defect")

    supervisor.before_next = fail
    end(miner, 1)
    supervisor.step()
    assert supervisor.state is State.WAITING
    before = supervisor.policy.failures
    cast(FakeClock, supervisor.clock).advance(3600.0)
    supervisor.step()
    assert supervisor.policy.failures == before + 1, "it was launched, and failed for want of pipes"


def test_every_tick_reaches_the_monitors_even_if_the_records_cannot_be_read(
    supervisor: Supervisor, miner: KeptMiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unreadable record must not disable hang detection for all ranks."""
    cast(Any, supervisor.flights).failing = True
    ticks: list[float] = []
    monkeypatch.setattr(supervisor.runner, "tick", lambda now, _ranks: ticks.append(now))
    supervisor.tick()
    assert ticks


def test_a_restart_in_place_counts_once_however_its_ranks_come_back() -> None:
    """torchrun's restarts were once invisible: `restarts 0` after two of them."""
    seen = RestartsInPlace()

    def replaced(**pids: int) -> list[list[int]]:
        ranks = {int(name[1:]): Identity(pid, 0, 0, 2, pid) for name, pid in pids.items()}
        return [each.fields["ranks"] for each in seen.replaced(ranks)]

    assert replaced() == []
    assert replaced(r0=10, r1=11) == []
    assert replaced(r0=10, r1=21) == [[1]]
    assert replaced(r0=10, r1=21) == []
    assert replaced(r0=20, r1=21) == [], "the same restart"
    assert replaced(r1=21) == []
    assert replaced(r0=30, r1=31) == [[0, 1]]
    assert seen.count == 2
    seen.launched()
    assert replaced(r0=40) == []
    assert seen.count == 2, "a launch by the guard is counted elsewhere"


@pytest.mark.parametrize(
    ("generation", "world_size", "level", "end"),
    [
        (1, 4, "warning", "replaced 1 rank, restart 1 in place"),
        (2, 4, "warning", "replaced 1 rank, restart 2 in place"),
        (0, 6, "info", "restart 1 in place; world size 4 -> 6"),
        (1, 2, "info", "restart 1 in place; world size 4 -> 2"),
    ],
)
def test_a_restart_in_place_names_generation_and_membership(
    generation: int, world_size: int, level: str, end: str
) -> None:
    """A node that joins or leaves is no failure, even where its peers fail for want of it."""
    seen = RestartsInPlace()
    assert list(seen.replaced({0: Identity(10, 0, 0, 4, 1)})) == []
    now = Identity(20, 0, 0, world_size, 2, generation=generation)
    [told] = seen.replaced({0: now})
    assert told.text.endswith(end)
    fields = told.fields
    assert (told.level, fields["generation"], fields["world_size"]) == (
        level,
        generation,
        world_size,
    )


@pytest.mark.parametrize(
    ("meanwhile", "restarts"), [("nothing", 1), ("a step", 0), ("another launch", 0)]
)
def test_a_hang_that_is_over_when_its_evidence_is_there_is_left_alone(
    tmp_path: Path, events: list[Event], meanwhile: str, restarts: int
) -> None:
    """Gathering stacks takes up to half a minute; a new launch must not pay for the hang of the one
    before it."""
    clock, jobs, steered = FakeClock(), JobsLater(), Steered()
    config = replace(Config(), hang=HangSettings(min_s=5.0, first_step_s=5.0, action="restart"))
    watch = HangMonitor(
        context(
            tmp_path, config=config, clock=clock, emit=events.append, jobs=jobs, control=steered
        )
    )
    watch.on_launch(Launch(("true",), 1, 0, clock.monotonic()))
    ranks: Mapping[int, Now] = {
        0: Now("running", "data", 0.0, 0.0, 1, 1, 1, None, None, None, None, 1)
    }
    for _ in range(8):
        clock.advance(1.0)
        list(watch.on_tick(clock.monotonic(), ranks))
    (gather,) = jobs.waiting
    if meanwhile == "a step":
        watch.on_steps(
            0, [cast(Any, SimpleNamespace(end=clock.monotonic(), seconds=9.0, phases={}))]
        )
    elif meanwhile == "another launch":
        watch.on_launch(Launch(("true",), 2, 1, clock.monotonic()))
    gather()
    assert [what for what, _ in steered.asked] == ["restart"] * restarts
    assert [f.name for f in events].count("hang_detected") == restarts
