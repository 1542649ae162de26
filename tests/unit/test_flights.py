"""How the supervisor reads the ranks' flight records: the order in which it delivers their steps,
and that it holds none back forever."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from miner_guard.guard.flights import Flights
from miner_guard.rank import flight
from miner_guard.rank.environment import find
from miner_guard.rank.flight import FlightReader, FlightWriter, process_start
from miner_guard.rank.guard import Guard
from miner_guard.rank.layout import (
    ACK,
    FILE_SIZE,
    IDENTITY,
    MAGIC,
    NOW_OFFSET,
    VERSION,
    StepRecord,
    step_offset,
)
from miner_guard.state_dir import StateDir
from tests.unit.rank.helpers import place

RUN = "r1"
TIMES = 32
"""Offset of `start` and `end` in a step record."""


class _Heard:
    def __init__(self) -> None:
        self.steps_of: list[tuple[int, int]] = []
        self.entries_of: list[tuple[int, Any]] = []

    def steps(self, rank: int, steps: Sequence[StepRecord]) -> None:
        self.steps_of += [(rank, step.total_steps) for step in steps]

    def entry(self, rank: int, entry: Mapping[str, Any]) -> None:
        self.entries_of.append((rank, entry["n"]))


def _record(total: int) -> StepRecord:
    return StepRecord(
        outer_step=1,
        inner_step=total,
        total_steps=total,
        start=total,
        end=total + 0.9,
        wall=1e9,
        loss=3.0,
    )


class _Ranks:
    """Ranks that write steps, and the supervisor's side that reads them."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self.state = StateDir(folder)
        self.writers = {
            r: FlightWriter(
                self.state.flight_of(r), rank=r, local_rank=r % 8, world_size=16, run_id=RUN
            )
            for r in ranks
        }
        self.heard = _Heard()
        self.flights = Flights(self.state, RUN, lambda event: pytest.fail(str(event)))
        self.flights.launched(os.getpid())
        for writer in self.writers.values():
            writer.show_state("running", 1.0)

    def step(self, rank: int, total: int) -> None:
        self.writers[rank].append(_record(total))

    def bell(self, rank: int) -> None:
        self.flights.look_at(rank, self.heard)

    def tick(self) -> None:
        self.flights.poll(self.heard)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[_Ranks]:
    made = _Ranks(tmp_path, (0, 1))
    yield made
    made.flights.close()
    for writer in made.writers.values():
        writer.close()


def test_the_lead_ranks_step_comes_first_in_any_order_of_notifications(ranks: _Ranks) -> None:
    for rank in (1, 0):
        ranks.step(rank, 1)
    ranks.bell(1)
    assert ranks.heard.steps_of == [(0, 1), (1, 1)]


def test_a_rank_that_is_ahead_waits_a_tick_for_the_lead_rank(ranks: _Ranks) -> None:
    ranks.step(1, 1)
    ranks.bell(1)
    ranks.tick()
    assert ranks.heard.steps_of == []
    ranks.step(0, 1)
    ranks.bell(0)
    ranks.tick()
    assert ranks.heard.steps_of == [(0, 1), (1, 1)]


def test_a_lead_rank_that_never_steps_delays_the_others_only_briefly(ranks: _Ranks) -> None:
    ranks.step(1, 1)
    for _ in range(3):
        ranks.tick()
    assert ranks.heard.steps_of == [(1, 1)]


@pytest.mark.parametrize("odd", [float("nan"), 1e308, -1.0])
def test_a_step_with_invalid_times_counts_as_torn_and_the_next_one_is_read(
    ranks: _Ranks, odd: float
) -> None:
    """Reading a NaN in the ring once raised at every tick, and when the launch ended."""
    ranks.step(0, 1)
    ranks.step(0, 2)
    memory_of_it = ranks.writers[0].map
    # Sequence, outer, inner and total step come before the times.
    struct.pack_into("<dd", memory_of_it, step_offset(0) + TIMES, odd, odd)
    assert struct.unpack_from("<dd", memory_of_it, step_offset(1) + TIMES) == (2.0, 2.9)
    ranks.tick()
    assert ranks.heard.steps_of == [(0, 2)]


def test_a_record_that_cannot_be_read_hides_no_other_rank(
    ranks: _Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad record must not disable hang detection for all ranks."""
    ranks.tick()
    ranks.step(0, 1)
    ranks.step(1, 1)
    whole = FlightReader.steps

    def steps(reader: FlightReader, since: int = 0) -> Iterator[StepRecord]:
        if reader.identity.rank == 0:
            raise ValueError("a defect")
        return whole(reader, since)

    monkeypatch.setattr(FlightReader, "steps", steps)
    for _ in range(4):
        with pytest.raises(ValueError, match="a defect"):
            ranks.tick()
    assert ranks.heard.steps_of == [(1, 1)]


def test_a_copy_that_is_cut_short_costs_nothing_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean-up of the folder once killed the guard and the rank, which read mapped files past
    their end."""
    monkeypatch.setattr(flight, "COPY_EVERY_S", 0.0)
    state, heard = StateDir(tmp_path), _Heard()
    flights = Flights(state, RUN, lambda event: pytest.fail(str(event)))
    writers = [_worker(state, rank, rank, process=os.getpid()) for rank in (0, 1)]
    flights.poll(heard)
    os.truncate(state.flight_of(0), 4096)
    assert sorted(flights.now()) == [0, 1]
    assert flights.ask_checkpoint() == 2
    flights.poll(heard)
    assert state.flight_of(0).stat().st_size == FILE_SIZE
    flights.close()
    for writer in writers:
        writer.close()


def test_the_last_records_of_a_killed_rank_are_read_and_kept(tmp_path: Path) -> None:
    """Its memory lives on in the supervisor, and then in the copy."""
    state, heard = StateDir(tmp_path), _Heard()
    flights = Flights(state, RUN, lambda event: pytest.fail(str(event)))
    writer = _worker(state, 0, 0, process=os.getpid())
    flights.poll(heard)
    writer.append(_record(1))
    (state.flight / "rank-0000.live").unlink()
    for _ in range(3):
        flights.poll(heard)
    assert heard.steps_of == [(0, 1)]
    writer.append(_record(2))
    flights.last_poll(heard)
    assert heard.steps_of == [(0, 1), (0, 2)]
    flights.close()
    assert [s.total_steps for s in FlightReader(state.flight_of(0)).steps()] == [1, 2]


def test_a_rank_in_another_pid_namespace_is_followed_by_its_copy(tmp_path: Path) -> None:
    """Across namespaces `rank-0000.live` leads nowhere, so the rank keeps the copy itself."""
    state, heard = StateDir(tmp_path), _Heard()
    flights = Flights(state, RUN, lambda event: pytest.fail(str(event)))
    writer = _worker(state, 0, 0, process=os.getpid())
    (state.flight / "rank-0000.live").unlink()
    for number in (1, 2):
        writer.append(_record(number))
        flight.copy_now(writer.path, writer._fd)
        flights.poll(heard)
    assert heard.steps_of == [(0, 1), (0, 2)]
    flights.close()


def _worker(state: StateDir, rank: int, local_rank: int, *, process: int) -> FlightWriter:
    """A worker from this launch, with the pid of a live or dead process."""
    writer = FlightWriter(
        state.flight_of(rank), rank=rank, local_rank=local_rank, world_size=4, run_id=RUN
    )
    start = process_start(process) if process == os.getpid() else 2**40
    IDENTITY.pack_into(
        writer.map, 0, MAGIC, VERSION, process, rank, local_rank, 4, start, RUN.encode(), 0.0, 0
    )
    writer.show_state("running", 1.0)
    return writer


def test_workers_that_the_launcher_restarts_under_other_ranks_replace_the_old_ones(
    tmp_path: Path,
) -> None:
    """torchrun renumbers the ranks. Otherwise the guard would report hangs of ranks that no longer
    exist, and wait for them to finish."""
    state, heard, gone = StateDir(tmp_path), _Heard(), 2**22
    flights = Flights(state, RUN, lambda event: pytest.fail(str(event)))
    old = [_worker(state, rank, rank - 2, process=gone) for rank in (2, 3)]
    flights.poll(heard)
    assert sorted(flights.now()) == [2, 3]
    old[0].journal({"n": "its last words"})
    new = [_worker(state, rank, rank, process=os.getpid()) for rank in (0, 1)]
    for _ in range(3):
        flights.poll(heard)
    assert sorted(flights.now()) == [0, 1]
    assert heard.entries_of == [(2, "its last words")]
    flights.close()
    for writer in (*old, *new):
        writer.close()


def test_the_copy_of_an_earlier_run_is_left_alone_until_this_run_has_a_record(
    tmp_path: Path,
) -> None:
    state, heard = StateDir(tmp_path), _Heard()
    flights = Flights(state, RUN, lambda event: pytest.fail(str(event)))
    earlier = FlightWriter(state.flight_of(0), rank=0, local_rank=0, world_size=1, run_id="earlier")
    earlier.append(_record(7))
    earlier.close()
    for _ in range(2):
        flights.poll(heard)
    assert flights.now() == {}
    writer = _worker(state, 0, 0, process=os.getpid())
    writer.append(_record(1))
    flights.poll(heard)
    assert flights.now()[0].total_steps == 1
    flights.close()
    writer.close()


def test_what_a_rank_wrote_before_it_was_killed_in_the_middle_of_its_header_is_read(
    tmp_path: Path,
) -> None:
    """A killed rank never releases the lock; its decisions and steps must not be lost with it."""
    ranks = _Ranks(tmp_path, (0,))
    ranks.step(0, 1)
    writer = ranks.writers[0]
    writer.journal({"n": "its last words"})
    ACK.pack_into(writer.map, NOW_OFFSET, 1)
    ranks.flights.last_poll(ranks.heard)
    assert ranks.heard.steps_of == [(0, 1)]
    assert ranks.heard.entries_of == [(0, "its last words")]
    ranks.flights.close()


@pytest.mark.parametrize(
    ("variables", "finished"), [({"LOCAL_WORLD_SIZE": "3"}, False), ({}, True)]
)
def test_a_finish_needs_the_report_of_the_highest_local_rank(
    tmp_path: Path, variables: dict[str, str], finished: bool
) -> None:
    """Otherwise a miner whose last rank died before it had a record would count as finished and
    stay down."""
    state = StateDir(tmp_path)
    for rank in (0, 1):
        Guard(place(state, rank=rank, world_size=3, LOCAL_RANK=str(rank), **variables)).close(
            finished=True
        )
    flights = Flights(state, find({}).run_id, lambda event: pytest.fail(str(event)))
    flights.poll(_Heard())
    assert flights.all_in({"finished"}) is finished
    flights.close()
