"""One bad entry, byte or argument affects only itself, and nothing that comes after it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from miner_guard.cli import screen
from miner_guard.cli.options import choose_state
from miner_guard.config import LogSettings
from miner_guard.costs import get_global_tracker, set_global_tracker
from miner_guard.exits import Refused
from miner_guard.guard.control import Status
from miner_guard.guard.flights import Flights
from miner_guard.guard.wire import WireListener
from miner_guard.keeper.relay import _Stream
from miner_guard.record.emitter import Emitter, JsonlFile
from miner_guard.record.events import Event, event
from miner_guard.record.lines import console_line
from miner_guard.record.redaction import Redactor
from miner_guard.record.store import RunStore, StoredEvent
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Context
from miner_guard.watch.checkpoints import ReportsMonitor
from miner_guard.watch.runner import MonitorRunner
from tests.support.present_state import status_of
from tests.support.ranks import Unwatched
from tests.support.simulated_parts import LogOnDisk

RUN = "r" * 12

_ODD = {"run_id": "of another version"}


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def _host(state: StateDir) -> MonitorRunner:
    clock = FakeClock()
    host = MonitorRunner(Emitter(clock, RUN, Redactor(), [LogOnDisk(state.log)]).emit)
    host.monitors = [ReportsMonitor(cast(Context, SimpleNamespace(clock=clock)))]
    return host


def _messages(state: StateDir) -> list[str]:
    return [json.loads(line)["msg"] for line in state.log.read_text(encoding="utf-8").splitlines()]


def test_an_entry_whose_fields_do_not_fit_its_words_is_shown(state: StateDir) -> None:
    """A rank of a different version: its `slow_step` has a field that this version reserves."""
    host = _host(state)
    odd = Event("slow_step", "warning", "SLOW STEP", _ODD)
    for each in (odd, event("rank_message", "info", "what came after it", text="…")):
        host.entry(0, {"kind": "event", "t": 1.0, **each.to_json()})
    messages = _messages(state)
    assert "slow_step" in messages[0]
    assert messages[1:] == ["what came after it"]


def test_an_entry_that_no_monitor_can_read_does_not_come_again() -> None:
    """An entry that raised at every poll once hid every step, hang and decision behind it."""
    idle = Unwatched()

    class Refuses:
        def steps(self, rank: int, steps: object) -> None: ...

        def entry(self, rank: int, entry: object) -> None:
            raise ValueError("no part takes this")

    loop: Any = idle
    wire = WireListener(loop, idle, pytest.fail)
    flights = Flights(wire, Refuses(), loop, keeper=idle, report=pytest.fail)
    flights.launched(0)
    writer = flights.open_writer(os.getpid())
    for _ in range(2):
        writer.journal({"kind": "event"})
    for _ in range(2):
        with pytest.raises(ValueError, match="no part"):
            flights.poll()
    flights.poll()
    wire.close()


def test_a_log_that_fails_is_reported_once_and_the_parts_still_hear(state: StateDir) -> None:
    events: list[Event] = []

    def log(event: Event) -> None:
        if event.name == "rank_message":
            raise RecursionError("too deep")
        events.append(event)

    host, heard = MonitorRunner(log), list[Event]()
    host.on_event = heard.append
    for _ in range(3):
        host.log(event("rank_message", "info", "x", text="x"))
    assert [event.name for event in events] == ["guard_degraded"]
    assert "rank_message.log failed with RecursionError" in events[0].fields["what"]


@pytest.mark.parametrize(
    "document",
    [
        {"event": ["x"], "fields": {}},
        {"event": "slow_step", "fields": {}, "level": ["x"]},
        {"event": None},
    ],
)
def test_an_entry_with_unknown_content_is_not_an_event(document: dict[str, Any]) -> None:
    assert Event.from_json(document) is None


def test_bytes_that_are_not_text_in_a_command_do_not_stop_the_status(state: StateDir) -> None:
    """Otherwise the state would never be written again, and nothing would feed systemd's
    watchdog."""
    argument, store = os.fsdecode(b"name-\xff"), RunStore(state.db)
    status = Status(FakeClock(), lambda *row: store.write(row))
    status.update({"command": ["train.py", argument]})
    assert status_of(state.root)["command"] == ["train.py", "name-?"]


def test_a_quiet_guard_composes_its_status_seldom_and_a_change_at_once() -> None:
    """An idle guard must not spend half its time on a document that stays the same."""
    clock = FakeClock()
    status = Status(clock, pytest.fail)
    assert status.due(("running", 1))
    composed = []
    for _ in range(20):
        clock.advance(1.0)
        composed.append(status.due(("running", 1)))
    assert 3 <= sum(composed) <= 5
    assert status.due(("running", 2))


def test_checksums_cache_folders_and_counts_of_tokens_are_not_secrets_but_a_bare_key_is() -> None:
    """The redactor must not mask paths, or every 100000 in the log."""
    digest = "0123456789abcdef" * 4
    env = {
        "MAX_TOKENS": "100000",
        "TOKENIZERS_PARALLELISM": "false",
        "API_TOKENS": "first-one,second",
    }
    redactor = Redactor.from_environment(env)
    plain = (
        f"step 100000 false /hub/blobs/{digest} sha256:{digest} commit {digest[:40]} "
        f"/cache/{digest[:32]}/x"
    )
    assert redactor.text(plain) == plain
    assert redactor.text(f"key {digest} blobs {digest} first-one,second") == (
        "key [redacted] blobs [redacted] [redacted]"
    )
    # A known secret is a secret wherever it appears.
    assert digest not in Redactor([digest]).text(f"/hub/blobs/{digest} sha256:{digest}")


def test_a_full_disk_below_the_console_costs_lines_and_not_the_console(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log file must not stay silent for the rest of the month because the disk was full for a
    minute."""
    full, there = os.open("/dev/full", os.O_WRONLY), os.pipe2(os.O_NONBLOCK)
    full_pipe = _Stream(full, lambda _data: None, lambda: None)
    full_pipe.print_line("lost\n")
    deadline = time.monotonic() + 20
    while not full_pipe.dropped:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr(full_pipe, "_send", lambda view: os.write(there[1], view))
    full_pipe.print_line("there again\n")
    full_pipe.finish(20.0)
    assert (full_pipe.dropped, os.read(there[0], 100)) == (5, b"there again\n")
    for fd in (full, *there):
        os.close(fd)


def test_terminal_control_sequences_are_shown_and_not_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line of the miner must not clear the screen, rename the window, or hide the text before
    it."""
    evil = "evil \x1b]0;title\x07 \x1b[2J \x9b31m\rfine"
    record = {
        "ts": "2026-01-02T03:04:05.678901Z",
        "level": "warning",
        "event": "rank_message",
        "msg": evil,
        "rank": 0,
    }
    harmless = r"evil \x1b]0;title\x07 \x1b[2J \u009b31m\x0dfine"
    assert console_line(record, emoji=False).endswith(harmless)
    hit = StoredEvent(1, record["ts"], "warning", "rank_message", 0, "r", "h", evil, "{}")
    assert hit.headline == harmless
    assert screen.cut(f"gate {evil}\nnext", 200) == f"gate {harmless} next"
    block = {**record, "msg": "head\n\tbody"}
    assert console_line(block, emoji=True).endswith("head\n\tbody")
    monkeypatch.setattr("miner_guard.record.lines.visible", str)
    assert console_line(record, emoji=False).endswith(evil), "the attack works"


def test_without_a_home_the_state_directory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs under an unknown uid has neither HOME nor an entry in /etc/passwd."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MINER_GUARD_STATE_DIR", "XDG_STATE_HOME", "_MINER_GUARD_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(Refused, match="Pass --state-dir, or set HOME"):
        choose_state("miner", None)
    set_global_tracker(None)
    try:
        assert get_global_tracker().get_report()["total_time"] == 0
    finally:
        set_global_tracker(None)


def test_a_log_that_somebody_removed_is_recreated(state: StateDir) -> None:
    """After a person made room on a full disk, the guard wrote to the removed file, and the log
    stayed silent for days."""
    file = JsonlFile(state.log, LogSettings())
    for text in ("one", "two", "three"):
        file.append(f'{{"msg": "{text}"}}')
        if text == "one":
            state.log.unlink()
        elif text == "two":
            state.log.rename(state.root / "moved")
    assert json.loads(state.log.read_text()) == {"msg": "three"}
    assert json.loads((state.root / "moved").read_text()) == {"msg": "two"}
    file.close()
