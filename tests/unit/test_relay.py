"""The relay passes on before the parts look: neither a slow part nor one that fails holds the miner up."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from miner_guard.clock import SystemClock
from miner_guard.supervisor import relay as relay_module
from miner_guard.supervisor.loop import Loop
from miner_guard.supervisor.relay import Relay

OUTPUT = b"".join(b"%06d Inner Step\n" % n for n in range(40_000))


class Stage:
    """A relay from a pipe to a file, turned by hand."""

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
        """What has left the guard when it ends now."""
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
            # Not before: pytest sets its own between the fixtures and the test.
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", out)
            stages.append(Stage(tmp_path / "out", show))
            return stages[-1]

        yield make
        for each in stages:
            each.close()


def test_what_is_in_the_pipe_is_passed_on_before_the_parts_look(stage: Open) -> None:
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    at.turn()
    assert shown == []
    assert at.written() == OUTPUT


def test_the_parts_see_every_byte_in_order(stage: Open) -> None:
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    at.turn(30)
    assert b"".join(shown) == OUTPUT


def test_the_last_words_are_shown_before_the_end(stage: Open) -> None:
    shown: list[bytes] = []
    at = stage(shown.append)
    os.write(at.miner, OUTPUT)
    at.relay.drain()
    assert b"".join(shown) == OUTPUT


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


def test_a_miner_that_prints_faster_than_the_parts_look_waits_for_them(
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


def test_the_memory_of_a_burst_is_given_back(stage: Open) -> None:
    at = stage(lambda _data: None)
    guard = psutil.Process()
    # What earlier tests left free would take the burst without growing.
    relay_module._give_memory_back()
    before = guard.memory_info().rss
    for _ in range(90):
        sent = at.relay.relayed_bytes + os.write(at.miner, OUTPUT)
        while at.relay.relayed_bytes < sent:
            at.turn()
    held = guard.memory_info().rss - before
    # What is allocated later lies above the burst, and keeps the heap from shrinking by itself.
    later = [bytes(100_000) for _ in range(10)]
    at.turn(600)
    deadline = time.monotonic() + 20
    while guard.memory_info().rss - before > held / 3 and time.monotonic() < deadline:
        # The thread that writes may hold the last of it for a moment.
        time.sleep(0.05)
        at.turn()
    after = guard.memory_info().rss - before
    del later
    assert held > 10 * 1024 * 1024
    assert after <= held / 3
