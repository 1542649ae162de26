"""The router delivers all output to the monitors, once, and to each monitor only the lines that may
concern it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from miner_guard.record.events import Event
from miner_guard.watch.base import Context, Exit, Monitor
from miner_guard.watch.line_router import MAX_LINE_BYTES
from miner_guard.watch.runner import MonitorRunner


class Everything(Monitor):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.shown: list[bytes] = []

    def on_output(self, chunk: bytes) -> Iterable[Event]:
        self.shown.append(bytes(chunk))
        return ()


class Seeker(Everything):
    words = frozenset({b"val_loss"})


class LineReader(Monitor):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.lines: list[bytes] = []

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        self.lines += lines
        return ()


class LineSeeker(LineReader):
    words = frozenset({b"val_loss"})


def _host() -> tuple[MonitorRunner, Everything, Seeker]:
    host = MonitorRunner(lambda _event: None)
    everything, seeker = Everything(cast(Context, None)), Seeker(cast(Context, None))
    host.monitors = [everything, seeker]
    return host, everything, seeker


@given(
    st.lists(
        st.sampled_from([b"step 1 | loss 3.4\n", b"VAL_LOSS: 3.1\n", b"\r 5%", b"x" * 9000, b"\n"]),
        max_size=40,
    )
)
def test_every_byte_arrives_once_and_in_order_however_the_output_is_cut(
    pieces: list[bytes],
) -> None:
    host, everything, seeker = _host()
    stream, cut, at = b"".join(pieces), random.Random(len(pieces)), 0
    while at < len(stream):
        size = cut.choice((1, 80, 4096, 10000, 65536))
        host.output(stream[at : at + size])
        at += size
    host.end_output()
    assert b"".join(everything.shown) == stream
    assert b"".join(seeker.shown).count(b"VAL_LOSS") == stream.count(b"VAL_LOSS")


def test_a_monitor_with_words_gets_no_block_without_them() -> None:
    host, _, seeker = _host()
    ordinary = b"".join(b"Inner Step: %d | Loss: 3.%d\n" % (n, n) for n in range(2000))
    for _ in range(3):
        host.output(ordinary)
    assert seeker.shown == []
    host.output(ordinary + b"Epoch 2 | Val_Loss: 3.25\n" + ordinary)
    assert seeker.shown == [ordinary + b"Epoch 2 | Val_Loss: 3.25\n" + ordinary]


def test_a_line_of_tens_of_kilobytes_arrives_whole() -> None:
    """A metagraph fills a line of 50 KB. In fragments it costs the scanner half as much again."""
    host, everything, _ = _host()
    log = (b"x" * 50_000 + b"\n") * 20
    for start in range(0, len(log), 65536):
        host.output(log[start : start + 65536])
    assert [piece for piece in everything.shown if not piece.endswith(b"\n")] == []


PIECES = st.sampled_from(
    [b"step 1 | loss 3.4\n", b"VAL_LOSS: 3.1\n", b"\r 5%", b"x" * 9000, b"\n", b"\r\n"]
)


@given(st.lists(PIECES, max_size=40), st.randoms(use_true_random=False))
def test_lines_arrive_whole_and_once_however_the_output_is_cut(
    pieces: list[bytes], cut: random.Random
) -> None:
    """Five buffers once cut long, redrawn or split lines, each by a rule of its own."""
    host, reader, seeker = MonitorRunner(lambda _f: None), *_line_readers()
    host.monitors = [reader, seeker]
    stream, at = b"".join(pieces), 0
    while at < len(stream):
        size = cut.choice((1, 80, 4096, 10000, 65536))
        host.output(stream[at : at + size])
        if cut.random() < 0.2:
            host.tick(0.0, {})
        at += size
    host.exit(Exit(0, None, True, False, 1.0))
    lines = [line for line in stream.replace(b"\r", b"\n").split(b"\n") if line]
    assert reader.lines == [line[:MAX_LINE_BYTES] for line in lines]
    expected = [line for line in lines[:] if b"VAL_LOSS" in line]
    assert [line for line in seeker.lines if b"VAL_LOSS" in line] == expected


def test_a_line_without_an_end_is_cut_and_takes_no_more_memory() -> None:
    host, reader, _ = MonitorRunner(lambda _f: None), *_line_readers()
    host.monitors = [reader]
    for _ in range(100):
        host.output(b"x" * 65536)
    host.output(b"\nnext\n")
    assert [len(line) for line in reader.lines] == [MAX_LINE_BYTES, len(b"next")]


class FewLines(LineReader):
    """A monitor that reads no further line after the third one with its word."""

    words = frozenset({b"loss"})

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        self.lines += lines[: 3 - len(self.lines)]
        if len(self.lines) == 3:
            self.words = frozenset()
        return ()


class Uploads(LineReader):
    words = frozenset({b"push", b"upload"})


WORDED = st.sampled_from(
    [b"step 1 | loss 3.4\n", b"VAL_LOSS: 3.1\n", b"Push done\n", b"upload 7", b"\n", b"\r 5%"]
)


@given(st.lists(WORDED, max_size=60), st.randoms(use_true_random=False))
def test_each_monitor_gets_the_lines_of_its_own_words_however_the_output_is_cut(
    pieces: list[bytes], cut: random.Random
) -> None:
    """A line that no longer concerns one monitor must still reach the others that share its
    filter."""
    host, uploads = MonitorRunner(lambda _f: None), Uploads(cast(Context, None))
    few, losses = FewLines(cast(Context, None)), LineSeeker(cast(Context, None))
    host.monitors = [few, uploads, losses]
    stream, at = b"".join(pieces) * 30, 0
    while at < len(stream):
        size = cut.choice((1, 80, 4096, 10000, 65536))
        host.output(stream[at : at + size])
        at += size
    host.exit(Exit(0, None, True, False, 1.0))
    lines = [line for line in stream.replace(b"\r", b"\n").split(b"\n") if line]
    for monitor in (uploads, losses):
        due = [line for line in lines if _has_word(monitor, line)]
        assert [line for line in monitor.lines if _has_word(monitor, line)] == due
    assert few.lines == [line for line in lines if b"loss" in line.lower()][:3]


def _has_word(monitor: Monitor, line: bytes) -> bool:
    return any(word in line.lower() for word in monitor.words or ())


def test_a_template_without_a_monitors_own_words_is_not_delivered_to_it() -> None:
    """Otherwise monitors would search every ordinary line because another monitor needs it."""
    host, uploads = MonitorRunner(lambda _f: None), Uploads(cast(Context, None))
    losses = LineSeeker(cast(Context, None))
    host.monitors = [uploads, losses]
    host.output(b"Val_Loss: 3.1\nupload of 7 began\n" * 2000)
    assert set(uploads.lines) == {b"upload of 7 began"}
    assert set(losses.lines) == {b"Val_Loss: 3.1"}


def _line_readers() -> tuple[LineReader, LineSeeker]:
    return LineReader(cast(Context, None)), LineSeeker(cast(Context, None))
