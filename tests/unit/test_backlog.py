"""Output that waits for the monitors: every byte, in order, in bounded memory."""

from __future__ import annotations

import random

import pytest

from miner_guard.guard.backlog import Backlog

CHUNK = 65536


def lines(number: int) -> bytes:
    return (b"Outer Step: 1 | Inner Step: %d | Loss: 3.4\n" % number) * 1500


def test_what_is_put_in_comes_out_in_order() -> None:
    chance, backlog = random.Random(1), Backlog()
    chunks = [lines(n) if n % 3 else chance.randbytes(CHUNK) for n in range(200)] + [b"x"]
    for chunk in chunks:
        backlog.put(chunk)
    assert backlog.size == sum(map(len, chunks))
    assert [backlog.take(0) for _ in chunks] == chunks
    assert (backlog.size, backlog.held) == (0, 0)
    with pytest.raises(IndexError):
        backlog.take(0)


def test_a_burst_of_lines_takes_a_fraction_of_its_size() -> None:
    """A 50 MB guard once grew to 104 MB while a miner was printing fast."""
    backlog = Backlog()
    for number in range(1000):
        backlog.put(lines(number))
    assert backlog.size > 60_000_000
    assert backlog.held < 10_000_000


def test_what_does_not_shrink_is_counted_as_it_is() -> None:
    chance, backlog = random.Random(2), Backlog()
    for _ in range(100):
        backlog.put(chance.randbytes(CHUNK))
    assert backlog.held == backlog.size == 100 * CHUNK


def test_chunks_that_fit_are_taken_together() -> None:
    chance, backlog = random.Random(4), Backlog()
    chunks = [lines(n) if n % 2 else chance.randbytes(CHUNK) for n in range(200)]
    for chunk in chunks:
        backlog.put(chunk)
    taken = []
    while backlog.size:
        taken.append(backlog.take(4 * CHUNK))
    assert b"".join(taken) == b"".join(chunks)
    assert max(map(len, taken)) <= 4 * CHUNK
    assert len(taken) < 100
    assert backlog.held == 0


def test_a_long_chunk_is_taken_in_parts() -> None:
    """A slow monitor must not receive a quarter of a megabyte at once."""
    chance, backlog = random.Random(5), Backlog()
    chunks = [lines(n) * 4 if n % 2 else chance.randbytes(3 * CHUNK + n) for n in range(200)]
    for chunk in chunks:
        backlog.put(chunk)
    taken = []
    while backlog.size:
        taken.append(backlog.part(CHUNK))
    assert b"".join(taken) == b"".join(chunks)
    assert max(map(len, taken)) == CHUNK
    assert backlog.held == 0
    with pytest.raises(IndexError):
        backlog.part(CHUNK)


def test_what_is_skipped_is_counted_out() -> None:
    backlog = Backlog()
    for number in range(100):
        backlog.put(lines(number))
    everything = b"".join(map(lines, range(100)))
    backlog.skip(0)
    assert backlog.size == len(everything)
    backlog.skip(1_000_000)
    backlog.skip(3_000_001)
    left = []
    while backlog.size:
        left.append(backlog.part(CHUNK))
    assert b"".join(left) == everything[4_000_001:]
    assert backlog.held == 0
    with pytest.raises(IndexError):
        backlog.skip(1)
