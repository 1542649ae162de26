"""Queries over guard.jsonl find exactly what was asked, across rotated files, and never fail on a
bad line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from miner_guard.config import LogSettings
from miner_guard.eventlog import catalog
from miner_guard.eventlog import query as logquery
from miner_guard.eventlog.emitter import Emitter
from miner_guard.eventlog.follow import Follower, Position
from miner_guard.eventlog.jsonl import JsonlSink
from miner_guard.eventlog.query import Query, Seen
from miner_guard.record.redaction import Redactor
from miner_guard.system.clock import FakeClock


def _emitter(log: Path, clock: FakeClock, max_bytes: int = 2000) -> Emitter:
    return Emitter(
        clock, "r1", Redactor(), [JsonlSink(log, LogSettings(max_bytes=max_bytes, keep=50))]
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """120 events over several rotated files: a slow step each minute, and one message each from
    ranks 0 and 1."""
    path, clock = tmp_path / "guard.jsonl", FakeClock()
    emitter = _emitter(path, clock)
    for minute in range(40):
        clock.advance(60)
        for rank in (0, 1):
            emitter.emit(
                catalog.make_finding(
                    "rank_message", rank=rank, text=f'say "slow_step" {minute}\n\\'
                )
            )
        emitter.emit(
            catalog.make_finding(
                "slow_step",
                rank=1,
                step_time_s=70.0 + minute,
                expected="1s",
                inner_step=minute,
                limit_s=60,
                rule="absolute",
            )
        )
    return path


def test_a_query_by_event_reads_all_rotated_files_in_order(log: Path) -> None:
    assert len(logquery.files_of(log)) > 3
    hits = list(logquery.search(log, Query(events=frozenset({"slow_step"}))))
    assert [hit.record()["inner_step"] for hit in hits] == list(range(40))
    assert {hit.event for hit in hits} == {"slow_step"}


def test_words_inside_a_message_are_not_an_event(log: Path) -> None:
    inner = {"event": "gpu_drop"}
    _emitter(log, FakeClock()).emit(
        catalog.make_finding("health_snapshot", summary='"event": "gpu_drop"', snapshot=inner)
    )
    assert not list(logquery.search(log, Query(events=frozenset({"gpu_drop"}))))


def test_level_rank_and_since_are_each_applied(log: Path) -> None:
    assert len(list(logquery.search(log, Query(min_level="warning")))) == 40
    assert len(list(logquery.search(log, Query(ranks=frozenset({0}))))) == 40
    assert len(list(logquery.search(log, Query(ranks=frozenset({1}), min_level="warning")))) == 40
    assert len(list(logquery.search(log, Query()))) == 120
    now = FakeClock().wall() + 40 * 60
    late = list(
        logquery.search(
            log, Query(since=logquery.since_text("10m", now), events=frozenset({"slow_step"}))
        )
    )
    assert [hit.record()["inner_step"] for hit in late] == list(range(29, 40))


def test_rank_1_is_not_rank_10(tmp_path: Path) -> None:
    log = tmp_path / "guard.jsonl"
    _emitter(log, FakeClock()).emit(catalog.make_finding("rank_message", rank=10, text="ten"))
    assert not list(logquery.search(log, Query(ranks=frozenset({1}))))


def test_the_message_comes_back_unchanged(log: Path) -> None:
    first = next(logquery.search(log, Query()))
    assert first.msg == 'say "slow_step" 0\n\\'
    assert "Rank 0" in first.console(emoji=True)


def test_lines_that_are_not_events_are_counted_and_skipped(tmp_path: Path) -> None:
    log = tmp_path / "guard.jsonl"
    _emitter(log, FakeClock()).emit(catalog.make_finding("rank_message", text="whole"))
    log.write_bytes(
        b'\x00\xff torn\n"a string"\n[1]\n{"ts": 1}\n\n' + log.read_bytes() + b'{"ts": "2026'
    )
    seen = Seen()
    assert [hit.msg for hit in logquery.search(log, Query(), seen)] == ["whole"]
    assert (seen.hits, seen.unreadable) == (1, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", "2026-01-02T03:02:35.000000Z"),
        ("1h", "2026-01-02T02:04:05.000000Z"),
        ("1.5d", "2025-12-31T15:04:05.000000Z"),
        ("99999999999d", "1970-01-01T00:00:00.000000Z"),
        ("2026-01-02", "2026-01-02T00:00:00.000000Z"),
        ("2026-01-02T03:04Z", "2026-01-02T03:04:00.000000Z"),
        ("2026-01-02T03:04:05.5", "2026-01-02T03:04:05.500000Z"),
    ],
)
def test_since_takes_durations_and_times(text: str, expected: str) -> None:
    assert logquery.since_text(text, FakeClock().wall()) == expected


@pytest.mark.parametrize("text", ["", "yesterday", "1y", "-1h", "2026-1-2", "2026-02-30"])
def test_since_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(ValueError, match="use 90s"):
        logquery.since_text(text, 0.0)


def test_following_loses_and_repeats_nothing_across_rotations(tmp_path: Path) -> None:
    log, clock = tmp_path / "guard.jsonl", FakeClock()
    emitter = _emitter(log, clock, max_bytes=600)
    emitter.emit(catalog.make_finding("rank_message", text="before"))
    follower = Follower(log, Query())
    seen: list[str] = []
    for number in range(200):
        emitter.emit(catalog.make_finding("rank_message", text=str(number)))
        if number % 7 == 0:
            seen += [hit.msg for hit in follower.poll()]
    seen += [hit.msg for hit in follower.poll()]
    follower.close()
    assert seen == [str(number) for number in range(200)]


def test_following_waits_for_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    log = tmp_path / "guard.jsonl"
    follower = Follower(log, Query())
    assert follower.poll() == []
    _emitter(log, FakeClock()).emit(catalog.make_finding("rank_message", text="first"))
    assert [hit.msg for hit in follower.poll()] == ["first"]
    follower.close()


@pytest.mark.parametrize("chunk", [1, 7, 64, 300, 4096])
@pytest.mark.parametrize("torn", [False, True])
def test_the_last_hits_read_from_the_end_are_the_last_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, torn: bool
) -> None:
    """Lines must not be cut, lost or duplicated where two blocks meet."""
    path, source = tmp_path / "guard.jsonl", random.Random(chunk)
    for name in ("guard.jsonl.2", "guard.jsonl.1", "guard.jsonl"):
        lines = []
        for _ in range(30):
            event = source.choice(("slow_step", "repo_age"))
            words = "x" * source.choice((0, 1, 50, 700))
            lines.append(
                f'{{"ts": "2026-01-02T03:04:05.000000Z", "level": "info", "event": "{event}", '
                f'"msg": "{words}", '
                f'"run_id": "r", "host": "h", "rank": null, "number": {source.random()}}}'
            )
        (tmp_path / name).write_text("\n".join(lines) + ("" if torn else "\n"))
    monkeypatch.setattr(logquery, "_CHUNK", chunk)
    for query in (Query(), Query(events=frozenset({"slow_step"}))):
        whole = [hit.raw for hit in logquery.search(path, query)]
        for count in (0, 1, 5, 40, 1000):
            assert [hit.raw for hit in logquery.last(path, query, count)] == whole[
                len(whole) - count if count < len(whole) else 0 :
            ]


def line(number: int) -> str:
    head = {"ts": "2026-01-02T03:04:05.678901Z", "level": "info", "event": "rank_message"}
    rest = {"msg": "x", "run_id": "r1", "host": "h", "rank": None, "n": number}
    return json.dumps({**head, **rest})


def test_a_follower_continues_at_a_stored_place_across_rotations_and_in_bounded_steps(
    tmp_path: Path,
) -> None:
    """A reader must not load days of a log at once after an outage of its receiver."""
    log = tmp_path / "guard.jsonl"
    log.write_text("".join(f"{line(number)}\n" for number in range(5)))
    follower = Follower(log, Query(), Position(log.stat().st_ino, 0))
    first = follower.poll(2 * len(line(0)) + 3)
    assert [hit.record()["n"] for hit in first] == [0, 1]
    place = follower.position
    follower.close()
    log.rename(tmp_path / "guard.jsonl.1")
    log.write_text("".join(f"{line(number)}\n" for number in range(5, 8)))
    again = Follower(log, Query(), place)
    seen = [hit.record()["n"] for _ in range(20) for hit in again.poll(100)]
    assert seen == [2, 3, 4, 5, 6, 7]
    again.close()


def test_a_stored_place_behind_the_end_of_a_new_file_with_the_old_inode_starts_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "guard.jsonl"
    log.write_text(f"{line(0)}\n")
    follower = Follower(log, Query(), Position(log.stat().st_ino, 10_000))
    assert [hit.record()["n"] for hit in follower.poll()] == [0]
    follower.close()
