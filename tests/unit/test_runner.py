"""Watchers get what they ask for, and one that fails is reported once and harms no other."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, event
from miner_guard.watch.base import Context, Exit, Monitor
from miner_guard.watch.line_router import MAX_LINE_BYTES
from miner_guard.watch.runner import MonitorRunner


class Broken(Monitor):
    name = "broken"

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        raise ValueError("no such thing")

    def snapshot(self) -> Mapping[str, Any]:
        raise KeyError("nor this")


class Talkative(Monitor):
    name = "talkative"

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Event]:
        return [event("rank_message", "info", "tick", text="tick")]

    def on_event(self, event: Event) -> Iterable[Event]:
        return [Event("rank_message", "info", "heard", {"text": f"heard {event.fields['text']}"})]

    def snapshot(self) -> Mapping[str, Any]:
        return {"fine": True}


def runner_of(*monitors: type[Monitor]) -> tuple[MonitorRunner, list[Event]]:
    logged: list[Event] = []
    made = MonitorRunner(logged.append)
    made.monitors = [monitor(cast(Context, None)) for monitor in monitors]
    return made, logged


def test_a_monitor_that_fails_is_reported_once_and_the_others_continue() -> None:
    made, logged = runner_of(Broken, Talkative)
    for now in range(3):
        made.tick(float(now), {})
    assert [f.name for f in logged].count("guard_degraded") == 1
    assert "broken.on_tick failed with ValueError: no such thing" in logged[0].fields["what"]
    assert [f.fields["text"] for f in logged if f.name == "rank_message"] == ["tick"] * 3


def test_a_snapshot_that_fails_is_unknown_not_absent() -> None:
    made, _ = runner_of(Broken, Talkative)
    assert made.snapshots() == {"broken": None, "talkative": {"fine": True}}


def test_events_that_lead_to_events_come_to_an_end() -> None:
    made, logged = runner_of(Talkative, Talkative)
    made.log(event("rank_message", "info", "start", text="start"))
    assert 3 <= len(logged) < 100


class Blocks(Monitor):
    """Takes blocks of output."""

    def __init__(self, words: frozenset[bytes] | None = None) -> None:
        super().__init__(cast(Context, None))
        self.words, self.shown = words, list[bytes]()

    def on_output(self, chunk: bytes) -> Iterable[Event]:
        self.shown.append(bytes(chunk))
        return ()


class Lines(Monitor):
    """Takes lines, and no further one after the first `most`."""

    def __init__(self, words: frozenset[bytes] | None = None, most: int = 10**9) -> None:
        super().__init__(cast(Context, None))
        self.words, self.most, self.lines = words, most, list[bytes]()

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Event]:
        self.lines += lines[: self.most - len(self.lines)]
        if len(self.lines) == self.most:
            self.words = frozenset()
        return ()

    def due(self, lines: Iterable[bytes]) -> list[bytes]:
        return [line for line in lines if any(word in line.lower() for word in self.words or ())]


def host_of(*monitors: Monitor) -> MonitorRunner:
    host = MonitorRunner(lambda _event: None)
    host.monitors = [*monitors]
    return host


PIECES = st.sampled_from(
    [
        *(b"step 1 | loss 3.4\n", b"VAL_LOSS: 3.1\n", b"Push done\n", b"upload 7"),
        *(b"\r 5%", b"x" * 9000, b"\n", b"\r\n"),
    ]
)


@given(st.lists(PIECES, max_size=60), st.randoms(use_true_random=False))
@example([b"upload 7", *[b"x" * 9000] * 8, b"\n"], random.Random(1))
def test_output_arrives_once_and_in_order_however_it_is_cut(
    pieces: list[bytes], cut: random.Random
) -> None:
    """Five buffers once cut long, redrawn or split lines, each by a rule of its own. A line that no
    longer concerns one monitor must still reach the others that share its filter."""
    everything, seeker = Blocks(), Blocks(frozenset({b"val_loss"}))
    every_line, few = Lines(), Lines(frozenset({b"loss"}), most=3)
    losses, uploads = Lines(frozenset({b"val_loss"})), Lines(frozenset({b"push", b"upload"}))
    host = host_of(everything, seeker, every_line, few, losses, uploads)
    stream, at = b"".join(pieces) * 5, 0
    while at < len(stream):
        size = cut.choice((1, 80, 4096, 10000, 65536))
        host.output(stream[at : at + size])
        if cut.random() < 0.2:
            host.tick(0.0, {})
        at += size
    host.exit(Exit(0, None, True, False, 1.0))
    whole = stream.replace(b"\r", b"\n").split(b"\n")
    lines = [line[:MAX_LINE_BYTES] for line in whole if line]
    assert b"".join(everything.shown) == stream
    assert b"".join(seeker.shown).count(b"VAL_LOSS") == stream.count(b"VAL_LOSS")
    assert every_line.lines == lines
    assert few.lines == [line for line in lines if b"loss" in line.lower()][:3]
    for monitor in (losses, uploads):
        assert monitor.lines == monitor.due(lines)


def test_a_monitor_with_words_gets_nothing_without_them() -> None:
    """Otherwise monitors would search every ordinary line because another monitor needs it."""
    seeker, uploads = Blocks(frozenset({b"val_loss"})), Lines(frozenset({b"upload"}))
    losses = Lines(frozenset({b"val_loss"}))
    host = host_of(seeker, uploads, losses)
    ordinary = b"".join(b"Inner Step: %d | Loss: 3.%d\n" % (n, n) for n in range(2000))
    host.output(ordinary)
    assert seeker.shown == []
    block = ordinary + b"Epoch 2 | Val_Loss: 3.25\nupload of 7 began\n" + ordinary
    host.output(block)
    assert seeker.shown == [block]
    assert (losses.lines, uploads.lines) == ([b"Epoch 2 | Val_Loss: 3.25"], [b"upload of 7 began"])


def test_a_long_line_arrives_whole_and_one_without_an_end_is_cut() -> None:
    """A metagraph fills a line of 50 KB. In fragments it costs the scanner half as much again."""
    everything, reader = Blocks(), Lines()
    host = host_of(everything, reader)
    log = (b"x" * 50_000 + b"\n") * 20
    for start in range(0, len(log), 65536):
        host.output(log[start : start + 65536])
    assert [piece for piece in everything.shown if not piece.endswith(b"\n")] == []
    reader.lines.clear()
    for _ in range(100):
        host.output(b"x" * 65536)
    host.output(b"\nnext\n")
    assert [len(line) for line in reader.lines] == [MAX_LINE_BYTES, len(b"next")]
