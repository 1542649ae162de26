"""The relay passes output on before the monitors read it: neither a slow monitor nor one that fails
delays the miner."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner_guard.guard import relay as relay_module
from miner_guard.guard.loop import Loop
from miner_guard.guard.relay import Relay
from miner_guard.system.clock import SystemClock
from tests.support.waiting import until

OUTPUT = b"".join(b"%06d Inner Step\n" % n for n in range(40_000))


class Stage:
    """A relay from a pipe to `out`, whose loop the test drives."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        self.errors: list[Exception] = []
        self.loop = Loop(SystemClock(), self.errors.append)
        self.relay = Relay(self.loop, show)
        self.miner, _ = self.relay.open()

    def turn(self) -> None:
        self.loop.after(0.0, lambda: None)
        self.loop.turn()

    def end(self) -> None:
        """End the launch, and let the monitors read all of its output."""
        self.relay.end_sources()
        deadline = time.monotonic() + 30
        while self.relay.pending:
            self.turn()
            assert time.monotonic() < deadline

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
            stages.append(Stage(show))
            return stages[-1]

        yield make
        for each in stages:
            each.close()


def test_output_is_passed_on_before_the_monitors_read_it(stage: Open, tmp_path: Path) -> None:
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    until(lambda: (tmp_path / "out").read_bytes() == OUTPUT)
    assert shown == []
    at.end()
    assert b"".join(shown) == OUTPUT
    assert at.relay.unchecked == 0


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_the_guards_lines_wait_for_the_end_of_a_half_printed_line(
    stage: Open, tmp_path: Path, spread: float
) -> None:
    at = stage(lambda _data: None)
    out = tmp_path / "out"
    os.write(at.miner, b"half ")
    until(lambda: out.read_bytes() == b"half ")
    at.relay.print_line("guard 1\n")
    at.relay.print_line("guard 2\n")
    time.sleep(spread)
    os.write(at.miner, b"a line\nnext")
    until(lambda: out.read_bytes() == b"half a line\nguard 1\nguard 2\nnext")
    at.relay.print_line("guard 3\n")
    # The miner never ends this line, so the guard does.
    until(lambda: out.read_bytes().endswith(b"\nnext\nguard 3\n"))


def test_monitors_that_fall_behind_miss_the_oldest_output(
    stage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MAX_UNSEEN", 2 * relay_module.CHUNK)
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    until(lambda: (tmp_path / "out").read_bytes() == OUTPUT)
    at.relay.show_rest()
    missed = at.relay.unchecked
    assert shown[0].startswith(b"\n"), "the two sides of the gap must not become one line"
    rest = b"".join(shown)[1:]
    assert missed + len(rest) == len(OUTPUT)
    assert missed > 0
    assert OUTPUT.endswith(rest)
    assert not at.relay.pending


def test_a_slow_monitor_receives_output_in_time_slices(stage: Open, tmp_path: Path) -> None:
    """Otherwise one loop iteration would last as long as the monitors need for a whole burst."""
    shown: list[bytes] = []

    def slow(data: bytes) -> None:
        shown.append(data)
        time.sleep(0.06)

    at = stage(slow)
    os.write(at.miner, OUTPUT)
    until(lambda: (tmp_path / "out").read_bytes() == OUTPUT)
    before = time.monotonic()
    at.turn()
    assert 1 <= len(shown) <= 2
    assert time.monotonic() - before < 0.5


def test_a_failing_monitor_stops_neither_the_output_nor_the_next_delivery(
    stage: Open, tmp_path: Path
) -> None:
    shown: list[bytes] = []

    def show(data: bytes) -> None:
        shown.append(data)
        if len(shown) == 1:
            raise ValueError("a defect")

    at = stage(show)
    os.write(at.miner, OUTPUT)
    at.end()
    assert [str(error) for error in at.errors] == ["a defect"]
    assert b"".join(shown) == (tmp_path / "out").read_bytes() == OUTPUT


def test_what_a_stuck_reader_does_not_take_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "STUCK_S", 0.2)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        at = Stage(lambda _data: None)
        os.write(at.miner, OUTPUT)
        at.end()
        assert at.relay.stuck
        in_the_pipe = len(OUTPUT) - at.relay.dropped_bytes
        assert 0 < in_the_pipe < len(OUTPUT)
        taken = b""
        while len(taken) < in_the_pipe:
            taken += os.read(reader, 65536)
        assert OUTPUT.startswith(taken)
        at.relay.print_line("back\n")
        assert os.read(reader, 65536).endswith(b"back\n")
        at.close()
    os.close(reader)


def test_a_stopped_terminal_that_another_program_made_non_blocking_costs_no_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard must not use 100 % of a core while ^S holds a terminal that ssh or node set to
    O_NONBLOCK."""
    controller, terminal = os.openpty()
    os.set_blocking(terminal, False)
    with os.fdopen(terminal, "wb") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        at = Stage(lambda _data: None)
        os.write(at.miner, OUTPUT)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1
        os.close(controller)
        at.close()
