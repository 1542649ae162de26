"""How the guard reads the ranks' records: who may connect, the order in which it delivers their
steps, that it holds none back forever, and what outlives a guard."""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from miner_guard.guard.flights import Flights
from miner_guard.guard.loop import Loop
from miner_guard.guard.wire import WireListener
from miner_guard.rank import layout
from miner_guard.rank import wire as rank_wire
from miner_guard.rank.environment import find
from miner_guard.rank.guard import Guard
from miner_guard.rank.layout import (
    NOW_OFFSET,
    FlightReader,
    FlightWriter,
    Identity,
    StepRecord,
    step_offset,
)
from miner_guard.record.events import Event
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import SystemClock

TIMES = 32
"""Offset of `start` and `end` in a step record."""

GONE = 2**22
"""A pid that no process has."""


class Keeper:
    """Holds descriptors for the next guard."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[Sequence[int], Any]] = {}

    def hold(self, name: str, fds: Sequence[int], note: Any = None) -> None:
        self.drop(name)
        self.held[name] = [os.dup(fd) for fd in fds], note

    def inherited(self) -> dict[str, tuple[Sequence[int], Any]]:
        """What the next guard gets."""
        return {name: ([os.dup(fd) for fd in fds], note) for name, (fds, note) in self.held.items()}

    def tell(self, name: str) -> None:
        assert name == "beat"

    def drop(self, name: str) -> None:
        for fd in self.held.pop(name, ((), None))[0]:
            os.close(fd)


class Rank:
    """A rank that writes steps."""

    def __init__(self, address: str, rank: int = 0, **identity: int) -> None:
        self.writer = FlightWriter()
        values = {"pid": os.getpid(), "rank": rank, "local_rank": rank % 8, "world_size": 16}
        own = Identity(**{**values, "process_start": 1, **identity})
        hello = {**own.as_dict(), "layout": layout.VERSION}
        self.wire = rank_wire.Wire(address, None, hello, self.writer.memory)
        self.writer.show_state("running", 1.0)

    def step(self, total: int) -> None:
        self.writer.append(
            StepRecord(
                outer_step=1, total_steps=total, start=total, end=total + 0.9, wall=1e9
            ).packed()
        )

    def kill(self) -> None:
        self.wire.close()
        self.writer.close()


class Reading:
    """A guard that reads ranks."""

    def __init__(self, keeper: Keeper | None = None) -> None:
        self.steps_of: list[tuple[int, int]] = []
        self.entries_of: list[tuple[int, Any]] = []
        self.events: list[Event] = []
        self.keeper = keeper or Keeper()
        self.loop = Loop(SystemClock(), lambda error: pytest.fail(str(error)))
        self.held = self.keeper.inherited()
        self.wire = WireListener(
            self.loop, self.keeper, self.events.append, self.held.get("wire", ())
        )
        self.flights = Flights(
            self.wire, self, self.loop, keeper=self.keeper, report=self.events.append
        )
        self.flights.launched(0)

    def steps(self, rank: int, steps: Sequence[StepRecord]) -> None:
        self.steps_of += [(rank, step.total_steps) for step in steps]

    def entry(self, rank: int, entry: Mapping[str, Any]) -> None:
        self.entries_of.append((rank, entry["n"]))

    def rank(self, rank: int = 0, **identity: int) -> Rank:
        return Rank(self.wire.address, rank, **identity)

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.flights.poll()

    def turn(self) -> None:
        """Handle what has arrived."""
        for _ in range(10):
            self.loop.after(0.0, lambda: None)
            self.loop.turn()


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.flights.close()
    made.wire.close()


def test_a_rank_that_is_ahead_waits_for_the_lead_rank_but_only_briefly(reading: Reading) -> None:
    lead, other = reading.rank(0), reading.rank(1)
    other.step(1)
    reading.poll(2)
    assert reading.steps_of == []
    lead.step(1)
    other.wire.ring()
    reading.turn()
    assert reading.steps_of == [(0, 1), (1, 1)]
    other.step(2)
    reading.poll(3)
    assert reading.steps_of[2:] == [(1, 2)]


def test_a_guard_that_is_far_behind_sends_its_heartbeat_while_it_catches_up(
    reading: Reading,
) -> None:
    """Four thousand steps in one turn took longer than a heartbeat may, on a busy machine: five
    guards in a row were killed as hung, each with more to read."""
    ranks = [reading.rank(number) for number in range(2)]
    for total in range(1, 1001):
        for rank in ranks:
            rank.step(total)
    seen: list[int] = []
    reading.loop.every(0.0001, lambda: seen.append(len(reading.steps_of)))
    reading.poll()
    while len(reading.steps_of) < 2000:
        reading.loop.turn()
    assert max(after - before for before, after in itertools.pairwise([0, *seen, 2000])) < 500
    assert {rank: [n for r, n in reading.steps_of if r == rank] for rank in (0, 1)} == {
        rank: [*range(1, 1001)] for rank in (0, 1)
    }
    for total in range(1001, 2001):
        ranks[0].step(total)
    reading.flights.poll(last=True)
    assert reading.steps_of[-1] == (0, 2000), "the last poll reads all"


@pytest.mark.parametrize("odd", [float("nan"), 1e308, -1.0])
def test_a_step_with_invalid_times_counts_as_torn_and_the_next_one_is_read(
    reading: Reading, odd: float
) -> None:
    """Reading a NaN in the ring once raised at every poll, and when the launch ended."""
    rank = reading.rank()
    rank.step(1)
    rank.step(2)
    struct.pack_into("<dd", rank.writer.map, step_offset(0) + TIMES, odd, odd)
    assert struct.unpack_from("<dd", rank.writer.map, step_offset(1) + TIMES) == (2.0, 2.9)
    reading.poll()
    assert reading.steps_of == [(0, 2)]


def test_a_record_that_cannot_be_read_hides_no_other_rank(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad record must not disable hang detection for all ranks."""
    for each in [reading.rank(0), reading.rank(1)]:
        each.step(1)
    whole = FlightReader.steps

    def steps(reader: FlightReader, since: int = 0) -> Iterator[StepRecord]:
        if reader.identity.rank == 0:
            raise ValueError("a defect")
        return whole(reader, since)

    monkeypatch.setattr(FlightReader, "steps", steps)
    for _ in range(4):
        with pytest.raises(ValueError, match="a defect"):
            reading.poll()
    assert reading.steps_of == [(1, 1)]


@pytest.mark.parametrize("torn", [False, True])
def test_all_that_a_killed_rank_wrote_is_read(reading: Reading, torn: bool) -> None:
    """Its memory lives on in the guard, even if the guard has not accepted its connection yet, and
    if it died while it wrote its header."""
    rank = reading.rank()
    rank.step(1)
    rank.step(2)
    rank.writer.journal({"n": "its last words"})
    if torn:
        struct.pack_into("<Q", rank.writer.map, NOW_OFFSET, 1)
    rank.kill()
    reading.flights.poll(last=True)
    assert reading.steps_of == [(0, 1), (0, 2)]
    assert reading.entries_of == [(0, "its last words")]


@pytest.mark.parametrize("stored", [True, False])
def test_the_next_guard_continues_where_a_killed_one_had_stored_everything(stored: bool) -> None:
    """A guard that was killed as it wrote a backlog once took 74 steps with it. What was stored
    does not come twice, and a rank that hangs or connects meanwhile is seen."""
    first = Reading()
    hangs = first.rank(0)
    hangs.step(1)
    hangs.writer.journal({"n": 1})
    hangs.writer.show_phase(b"allreduce", 5.0, 5.0, 60.0)
    first.poll()
    if stored:
        first.flights.commit()
    starts = first.rank(1)
    starts.step(1)
    hangs.writer.journal({"n": 2})
    first.loop.close()
    second = Reading(first.keeper)
    second.flights.adopt(second.held)
    second.poll(3)
    assert second.flights.headers()[0].phase == "allreduce"
    assert second.steps_of == ([] if stored else [(0, 1)]) + [(1, 1)]
    assert second.entries_of == [(0, 2)]
    hangs.wire.ring()
    assert not hangs.wire.alone
    second.flights.launched(1)
    assert second.flights.identities() == {}
    assert list(first.keeper.held) == ["wire"]


def test_a_record_of_a_launch_that_is_over_is_held_no_longer() -> None:
    """A guard that was killed between two launches once left the keeper with two descriptors per
    rank."""
    first = Reading()
    first.rank().kill()
    first.poll()
    first.loop.close()
    assert len(first.keeper.held) == 2
    second = Reading(first.keeper)
    second.flights.launched(1)
    second.flights.adopt(second.held)
    assert second.flights.identities() == {}
    assert list(first.keeper.held) == ["wire"]


def test_the_next_guard_does_not_read_a_record_of_another_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After `ctl reload` to a new version, while the miner keeps the old one."""
    first = Reading()
    rank = first.rank()
    first.poll()
    first.loop.close()
    monkeypatch.setattr(layout, "VERSION", layout.VERSION + 1)
    second = Reading(first.keeper)
    second.flights.adopt(second.held)
    first.flights.close()
    assert second.flights.identities() == {}
    rank.wire.ring()
    rank.wire._tried_at = -10.0
    rank.wire.ring()
    second.poll()
    assert (
        f"keeps its record in layout {layout.VERSION - 1}, and this guard reads"
        in second.events[0].text
    )


def test_a_rank_that_connects_again_keeps_its_record(reading: Reading) -> None:
    rank = reading.rank()
    rank.step(1)
    reading.poll()
    rank.wire._hang_up()
    rank.wire._tried_at = -10.0
    rank.step(2)
    rank.wire.ring()
    assert not rank.wire.alone
    reading.poll()
    assert reading.steps_of == [(0, 1), (0, 2)]


def test_workers_that_the_launcher_restarts_under_other_ranks_replace_the_old_ones(
    reading: Reading,
) -> None:
    """torchrun renumbers the ranks. Otherwise the guard would report hangs of ranks that no longer
    exist, and wait for them to finish."""
    old = [
        Rank(reading.wire.address, rank, local_rank=rank - 2, process_start=GONE) for rank in (2, 3)
    ]
    reading.poll()
    assert sorted(reading.flights.identities()) == [2, 3]
    old[0].writer.journal({"n": "its last words"})
    for each in old:
        each.wire.close()
    for rank in (0, 1):
        reading.rank(rank)
    reading.poll(3)
    assert sorted(reading.flights.identities()) == [0, 1]
    assert reading.entries_of == [(2, "its last words")]


@pytest.mark.parametrize("stepped", [True, False])
def test_of_two_processes_with_one_rank_one_is_recorded_and_the_guard_says_which(
    reading: Reading, stepped: bool
) -> None:
    """A pool's workers all pass for rank 0. The guard must not switch between them every second."""
    first = reading.rank(0, pid=os.getpid())
    if stepped:
        first.step(1)
    reading.poll()
    second = reading.rank(0, process_start=2)
    for _ in range(2):
        reading.poll(2)
        for each in (first, second):
            each.wire.ring()
            each.wire._tried_at = -10.0
            each.wire.ring()
    second.step(7)
    first.step(2)
    reading.poll(2)
    assert reading.steps_of == ([(0, 1), (0, 2)] if stepped else [(0, 7)])
    (said,) = reading.events
    assert "several processes train as rank 0" in said.text


@pytest.mark.parametrize("daemonic", [0, 1])
def test_a_worker_that_its_parent_ends_has_ended(reading: Reading, daemonic: int) -> None:
    """A finished pool counted as a failure, and was started again and again."""
    worker = reading.rank(0, daemonic=daemonic, local_rank=0)
    worker.step(1)
    reading.poll()
    assert not reading.flights.all_in({"ended"})
    worker.wire.close()
    reading.turn()
    assert reading.flights.all_in({"ended"}) is bool(daemonic)


HELLO = {**Identity(1, 0, 0, 1, 1).as_dict(), "layout": layout.VERSION}


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"token": "wrong"}, ""),
        ({"launch": 7}, ""),
        (
            {"layout": 1},
            f"rank 0 keeps its record in layout 1, and this guard reads layout {layout.VERSION}",
        ),
        ({"rank": "x"}, ""),
        (None, ""),
    ],
)
def test_who_is_no_rank_of_this_launch_is_turned_away(
    reading: Reading, hello: dict[str, Any] | None, said: str
) -> None:
    name, _, token = reading.wire.address.partition(" ")
    document = {"token": token, **HELLO, **(hello or {})}
    line = b"\xff no hello" if hello is None else json.dumps(document).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(f"\0{name}")
        socket.send_fds(caller, [line], [FlightWriter().memory])
        reading.poll(2)
        caller.settimeout(10.0)
        assert caller.recv(1) == b"", "it hung up"
    assert reading.flights.identities() == {}
    assert said in "".join(event.text for event in reading.events)
    assert bool(said) == bool(reading.events)


def test_memory_that_its_owner_could_shrink_is_refused(reading: Reading) -> None:
    """The guard would die of SIGBUS when it reads past the end."""
    memory = os.memfd_create("soft")
    os.ftruncate(memory, layout.MEMORY_SIZE)
    name, _, token = reading.wire.address.partition(" ")
    rank_wire.Wire(f"{name} {token}", None, HELLO, memory)
    reading.poll()
    assert reading.flights.identities() == {}
    assert "the record of rank 0 can't be read" in reading.events[0].text


def test_callers_that_say_nothing_keep_no_rank_out(reading: Reading) -> None:
    name = "\0" + reading.wire.address.partition(" ")[0]
    silent = []
    for _ in range(300):
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].connect(name)
    reading.rank().step(1)
    reading.poll()
    assert reading.steps_of == [(0, 1)]
    for each in silent:
        each.close()


@pytest.mark.parametrize("listener", ["guard", "rank"])
def test_a_process_of_another_user_is_neither_heard_nor_talked_to(
    reading: Reading, monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    """After the guard's death anybody may bind its abstract name."""
    monkeypatch.setattr(f"miner_guard.{listener}.wire.peer", lambda _: (1, 12345))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert reading.rank().wire.alone == (listener == "rank")
    reading.poll()
    assert reading.flights.identities() == {}


@pytest.mark.parametrize(
    ("variables", "finished"), [({"LOCAL_WORLD_SIZE": "3"}, False), ({}, True)]
)
def test_a_finish_needs_the_report_of_the_highest_local_rank(
    reading: Reading, tmp_path: Path, variables: dict[str, str], finished: bool
) -> None:
    """Otherwise a miner whose last rank died before it had a record would count as finished and
    stay down."""
    guards = []
    for rank in (0, 1):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", **variables}
        place = find({**env, rank_wire.WIRE: reading.wire.address}, StateDir(tmp_path).root)
        guards.append(Guard(place))
        guards[-1].close(finished=True)
    reading.poll()
    assert reading.flights.all_in({"finished"}) is finished


def test_the_journal_keeps_what_is_not_stored_and_counts_what_it_refuses() -> None:
    """It is a ring: what the guard has stored makes room, also across its end."""
    writer = FlightWriter()
    reader = FlightReader(writer.memory, Identity(1, 0, 0, 1, 1))
    words = "x" * 1000
    seen: list[int] = []
    written = 0
    for _ in range(3):
        while writer.journal({"n": written, "words": words}):
            written += 1
        for end, entry in list(reader.entries(reader.bytes_read)):
            seen.append(entry["n"])
            reader.bytes_read = end
    assert seen == list(range(written))
    assert written * 1000 > 2 * layout.JOURNAL_SIZE
    writer.show_state("running", 0.0)
    now = reader.now()
    assert now is not None
    assert now.lost == 3
    assert not writer.journal({"n": "x" * layout.JOURNAL_SIZE})
