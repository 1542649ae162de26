"""The relay passes output on before the monitors read it: neither a slow monitor nor one that fails
delays the miner."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner_guard.guard import output_writer as writer_module
from miner_guard.guard import relay as relay_module
from miner_guard.guard.loop import Loop
from miner_guard.guard.output_writer import OutputWriter
from miner_guard.guard.relay import Relay
from miner_guard.system import free_memory
from miner_guard.system.clock import SystemClock
from tests.support.waiting import until

GIVES_BACK = """
import psutil
from miner_guard.system.free_memory import give_back
guard = psutil.Process()
before = guard.memory_info().rss
burst = [b"x" * 100_000 + b"%d" % n for n in range(400)]
held = guard.memory_info().rss - before
# It lies above the burst, and keeps the heap from shrinking by itself.
later = [b"y" * 100_000 + b"%d" % n for n in range(10)]
del burst
give_back()
print(held, guard.memory_info().rss - before)
"""
RETAINS = """
import resource
from miner_guard.system.free_memory import retain
retain()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        blocks = [bytes([n]) * 270_000 for n in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""
OUTPUT = b"".join(b"%06d Inner Step\n" % n for n in range(40_000))


class Stage:
    """A relay from a pipe to a file, driven by the test."""

    def __init__(self, passed_on: Path, show: Callable[[bytes], None]) -> None:
        self._passed_on = passed_on
        self.errors: list[Exception] = []
        self.loop = Loop(SystemClock(), self.errors.append)
        self.relay = Relay(self.loop, show)
        self.miner, _ = self.relay.open()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.after(0.0, lambda: None)
            self.loop.turn()

    def written(self) -> bytes:
        """The output that would have left the guard if it exited now."""
        self.relay.finish(10.0)
        return self._passed_on.read_bytes()

    def close(self) -> None:
        self.relay.finish(10.0)
        os.close(self.miner)
        self.loop.close()


Open = Callable[[Callable[[bytes], None]], Stage]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    stages: list[Stage] = []
    with open(tmp_path / "out", "wb") as out:

        def make(show: Callable[[bytes], None]) -> Stage:
            # Not earlier, because pytest sets its own between the fixtures and the test.
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", out)
            stages.append(Stage(tmp_path / "out", show))
            return stages[-1]

        yield make
        for each in stages:
            each.close()


def test_piped_output_is_passed_on_before_the_monitors_read_it(stage: Open) -> None:
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    at.turn()
    assert shown == []
    assert at.written() == OUTPUT


def test_the_monitors_see_every_byte_in_order(stage: Open) -> None:
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    at.turn(30)
    assert b"".join(shown) == OUTPUT


def test_the_last_words_are_shown_before_the_end(stage: Open) -> None:
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    at.relay.end_sources()
    at.turn(30)
    assert b"".join(shown) == OUTPUT
    assert at.relay.show_rest() == 0


def test_a_flood_that_the_monitors_fall_behind_is_cut_to_its_end(stage: Open) -> None:
    """The end must not wait half a minute for the monitors to read output that no longer
    matters."""
    shown: list[bytes] = []
    at = stage(shown.append)
    flood = OUTPUT
    os.write(at.miner, flood)
    at.relay.end_sources()
    assert at.relay.unseen == len(flood)
    left_out = at.relay.show_rest()
    assert left_out == len(flood) - len(b"".join(shown)) > 0
    assert len(b"".join(shown)) <= relay_module.LAST_WORDS
    assert flood.endswith(b"".join(shown))
    assert at.relay.unseen == 0
    assert at.written() == flood


def test_a_slow_monitor_receives_output_in_time_slices(stage: Open) -> None:
    """Otherwise one loop iteration would last as long as the monitors need for a whole burst."""

    def slow(_data: bytes) -> None:
        time.sleep(0.06)

    at = stage(slow)
    os.write(at.miner, OUTPUT)
    at.relay.end_sources()
    at.turn()
    before = at.relay.unseen
    at.turn()
    assert before - at.relay.unseen == relay_module.CHUNK


def test_a_defect_while_looking_stops_neither_the_output_nor_the_next_look(stage: Open) -> None:
    shown: list[bytes] = []

    def show(data: bytes) -> None:
        shown.append(data)
        if len(shown) == 1:
            raise ValueError("a defect")

    at = stage(show)
    os.write(at.miner, OUTPUT)
    at.turn(30)
    assert [str(error) for error in at.errors] == ["a defect"]
    assert b"".join(shown) == OUTPUT
    assert at.written() == OUTPUT


def test_a_miner_that_prints_faster_than_the_monitors_read_waits_for_them(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_UNSEEN", 1024 * 1024)
    shown: list[bytes] = []
    at = stage(shown.append)
    os.set_blocking(at.miner, False)
    most = sent = 0
    deadline = time.monotonic() + 60
    while sent < 20 * 1024 * 1024 or sum(map(len, shown)) < sent:
        with contextlib.suppress(BlockingIOError):
            sent += os.write(at.miner, OUTPUT) if sent < 20 * 1024 * 1024 else 0
        at.turn()
        most = max(most, at.relay.relayed_bytes - sum(map(len, shown)))
        # The writing thread may be slow on a loaded machine; then the relay waits for it.
        at.relay.tick()
        assert time.monotonic() < deadline, (sent, at.relay.relayed_bytes, sum(map(len, shown)))
    assert most <= 3 * 1024 * 1024
    assert b"".join(shown)[: len(OUTPUT)] == OUTPUT


def _flood(at: Stage, megabytes: int) -> None:
    """Print as fast as the relay reads, so that it never finds the pipe empty."""
    os.set_blocking(at.miner, False)
    sent, deadline = 0, time.monotonic() + 60
    while sent < megabytes * 1024 * 1024:
        with contextlib.suppress(BlockingIOError):
            sent += os.write(at.miner, OUTPUT)
        at.turn()
        # The writing thread may be slow on a loaded machine; then the relay waits for it.
        at.relay.tick()
        assert time.monotonic() < deadline


def test_monitors_that_keep_up_with_a_flood_are_shown_it_while_it_arrives(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressing a flood costs more than letting the monitors read it."""
    monkeypatch.setattr(zlib, "compress", lambda *_given: pytest.fail("compressed"))
    shown: list[int] = []
    at = stage(lambda data: shown.append(len(data)))
    _flood(at, 20)
    assert sum(shown) >= 15 * 1024 * 1024
    assert at.errors == []


def test_monitors_that_do_not_keep_up_hold_a_burst_up_for_a_limited_time(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miner must not wait for monitors that can catch up once the burst is over."""
    monkeypatch.setattr(writer_module, "HIGH_WATER", 64 * 1024 * 1024)
    spent = 0.0

    def slow(data: bytes) -> None:
        nonlocal spent
        before, takes = time.thread_time(), 0.002 * len(data) / relay_module.CHUNK
        while time.thread_time() - before < takes:
            pass
        spent += takes

    at = stage(slow)
    _flood(at, 20)
    assert at.relay.unseen >= 10 * 1024 * 1024
    # Each delivery may exceed its time by one chunk.
    assert spent <= 20 * 1024 * 1024 * 3e-9 + 0.002 * 40


def test_the_memory_of_a_burst_is_given_back_once_the_reader_has_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If memory is given back while the writer still holds the burst, it stays with the process."""
    given_back: list[int] = []
    monkeypatch.setattr(relay_module, "_BURST", 1024 * 1024)
    monkeypatch.setattr(free_memory, "give_back", lambda: given_back.append(1))
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "wb"))
    at = Stage(Path(os.devnull), lambda _data: None)
    for _ in range(4):
        sent = at.relay.relayed_bytes + os.write(at.miner, OUTPUT)
        while at.relay.relayed_bytes < sent:
            at.loop.turn()
    at.turn(600)
    at.relay.tick()
    assert not given_back
    left = at.relay.relayed_bytes
    while left:
        left -= len(os.read(reader, left))
    until(lambda: all(sink.idle for sink in at.relay.writers))
    at.relay.tick()
    at.relay.tick()
    assert len(given_back) == 1
    at.close()
    os.close(reader)


def test_memory_below_what_is_still_in_use_goes_back_to_the_system() -> None:
    """In a separate process: memory that other tests freed would hide it."""
    measured = subprocess.run(
        [sys.executable, "-c", GIVES_BACK], capture_output=True, text=True, timeout=60, check=True
    )
    held, after = map(int, measured.stdout.split())
    assert held > 10 * 1024 * 1024
    assert after <= held / 3


def test_blocks_of_a_flood_use_the_same_memory_again() -> None:
    """A page fault for every 4 KiB once took a third of a flood's time. Runs in a separate process,
    because other tests leave free memory."""
    measured = subprocess.run(
        [sys.executable, "-c", RETAINS], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(measured.stdout) < 2000


def test_only_a_writer_that_held_the_miner_up_reports_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A miner that is not held up must not cost an iteration of the loop per write, and one that is
    held up must not wait forever."""
    rooms: list[int] = []
    reader, end = os.pipe()
    os.set_blocking(reader, False)
    sink = OutputWriter(end, lambda: rooms.append(1))
    sink.put([b"x" * 10_000] * 100)
    assert not sink.congested
    _drain(reader, sink)
    assert rooms == []
    monkeypatch.setattr(writer_module, "HIGH_WATER", 500_000)
    sink.put([b"x" * 10_000] * 100)
    assert sink.congested
    _drain(reader, sink)
    until(lambda: rooms == [1])
    assert not sink.congested
    os.close(reader)
    sink.finish(5.0)
    os.close(end)


def _drain(reader: int, sink: OutputWriter) -> None:
    def idle() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 65536)
        return sink.idle

    until(idle)


def test_a_stopped_terminal_that_another_program_made_non_blocking_costs_no_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard must not use 100 % of a core while ^S holds a terminal that ssh or node set to
    O_NONBLOCK."""
    controller, terminal = os.openpty()
    os.set_blocking(terminal, False)
    write, refused = os.writev, 0

    def counted(fd: int, batch: list[bytes]) -> int:
        nonlocal refused
        try:
            return write(fd, batch)
        except BlockingIOError:
            refused += 1
            raise

    monkeypatch.setattr(os, "writev", counted)
    sink = OutputWriter(terminal, lambda: None)
    sink.put([b"x" * 1_000_000])
    time.sleep(0.5)
    assert not sink.idle
    assert refused < 50
    os.close(controller)
    sink.finish(5.0)
    os.close(terminal)
