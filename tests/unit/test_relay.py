"""The relay passes output on unchanged, whoever reads the copy and whoever reads stdout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner_guard.keeper import relay as relay_module
from miner_guard.keeper.relay import Relay
from tests.support.waiting import until

OUTPUT = b"".join(b"%06d Inner Step\n" % n for n in range(40_000))


class Stage:
    """A relay from a pipe to `out`."""

    def __init__(self) -> None:
        self.copied: list[bytes] = []
        self.relay = Relay(self.copied.append, lambda: None)
        self.miner, _ = self.relay.open()

    def end(self) -> None:
        """End the launch, and relay all of its output."""
        self.relay.end_sources()
        until(lambda: not self.relay.pending, 30)

    def close(self) -> None:
        self.relay.finish(10.0)
        os.close(self.miner)


Open = Callable[[], Stage]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    stages: list[Stage] = []
    with open(tmp_path / "out", "wb") as out:

        def make() -> Stage:
            # Not earlier, because pytest sets its own between the fixtures and the test.
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", out)
            stages.append(Stage())
            return stages[-1]

        yield make
        for each in stages:
            each.close()


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_the_guards_lines_wait_for_the_end_of_a_half_printed_line(
    stage: Open, tmp_path: Path, spread: float
) -> None:
    at = stage()
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


def test_what_a_stuck_reader_does_not_take_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "STUCK_S", 0.2)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        at = Stage()
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
        at = Stage()
        os.write(at.miner, OUTPUT)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1
        os.close(controller)
        at.close()
