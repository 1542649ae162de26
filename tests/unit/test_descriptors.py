"""Waiting for files, whatever their descriptors are."""

from __future__ import annotations

import os
import resource
import selectors
import socket

import pytest

from miner_guard.system.descriptors import WakePipe, ready


def test_descriptors_beyond_those_of_select_are_waited_for() -> None:
    """A guard that inherited or opened 1,024 files must not die of `filedescriptor out of range in
    select()`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1400:
        if hard != resource.RLIM_INFINITY and hard < 1400:
            pytest.skip(f"at most {hard} descriptors are allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (1400, hard))
    low, write_end = os.pipe()
    try:
        high = 1300
        os.dup2(low, high)
        assert ready([high], 0.0) == []
        os.write(write_end, b"x")
        assert ready([high], 5.0) == [high]
    finally:
        for each in (low, high, write_end):
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_reading_and_writing_are_distinguished() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert ready([ours], 0.0) == []
        assert ready([ours], 0.0, selectors.EVENT_WRITE) == [ours]
        theirs.send(b"x")
        assert ready([ours], 5.0) == [ours]


def test_a_file_at_its_end_is_ready() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert ready([ours], 5.0) == [ours]


def test_a_wake_ends_one_wait_however_often_it_is_called_and_none_blocks() -> None:
    pipe = WakePipe()
    for _ in range(100_000):
        pipe.wake()
    assert ready([pipe.reading], 0.0) == [pipe.reading]
    pipe.clear()
    assert ready([pipe.reading], 0.0) == []
    pipe.clear()
    pipe.wake()
    assert ready([pipe.reading], 0.0) == [pipe.reading]
    pipe.close()
    pipe.wake()
