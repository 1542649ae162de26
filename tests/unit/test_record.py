"""The record's vocabulary: events, lines, settings, and the present state."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import structlog

from miner_guard.checks.ranks import diagnostics_block
from miner_guard.config import BadConfig, Config, LogSettings, loading
from miner_guard.record.emitter import ConsoleSink, Emitter, Record, bound_contextvars
from miner_guard.record.events import Event, WriteOutage, event, not_stored
from miner_guard.record.lines import json_line
from miner_guard.record.redaction import MASK, Redactor
from miner_guard.record.status_document import (
    ChainStatus,
    HealthStatus,
    Section,
    StatusDocument,
    read_status,
)
from miner_guard.record.words import visible
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock, Once, OncePer
from miner_guard.uploads.chain import ChainReading
from miner_guard.uploads.chain import as_fields as chain_fields
from miner_guard.watch.chain import ChainMonitor
from miner_guard.watch.host import HostMonitor
from tests.support.contexts import JobsNever, context
from tests.support.present_state import write_status
from tests.support.simulated_parts import LogOnDisk


class Kept:
    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)


def test_a_context_variable_is_a_field_of_each_event_within_and_gives_way_to_the_events_own() -> (
    None
):
    kept = Kept()
    emitter = Emitter(FakeClock(), "r1", Redactor(), [kept])
    with bound_contextvars(job="gpus"):
        emitter.emit(event("guard_degraded", "warning", "GUARD DEGRADED: x", what="x"))
        emitter.emit(event("guard_degraded", "warning", "GUARD DEGRADED: y", job="repo"))
    emitter.emit(event("guard_degraded", "warning", "GUARD DEGRADED: z", what="z"))
    assert [record.get("job") for record in kept.records] == ["gpus", "repo", None]


def test_a_processor_adds_to_a_record_or_drops_it_and_the_redactor_sees_what_it_added() -> None:
    def tagged(_logger: Any, level: str, record: Record) -> Record:
        if record["event"] == "gpu_usage":
            raise structlog.DropEvent
        return {**record, "seen": f"{level} {record['what']}", "token": "abcdef"}

    kept = Kept()
    emitter = Emitter(FakeClock(), "r1", Redactor(["planted"]), [kept], processors=[tagged])
    emitter.emit(event("guard_degraded", "warning", "GUARD DEGRADED: planted", what="planted"))
    emitter.emit(event("gpu_usage", "info", "GPU Memory Used: x"))
    (record,) = kept.records
    assert (record["seen"], record["token"]) == (f"warning {MASK}", MASK)


def test_the_json_line_begins_with_the_keys_that_readers_search_for() -> None:
    kept = Kept()
    Emitter(FakeClock(), "r1", Redactor(), [kept]).emit(
        event(
            "loss_nan",
            "critical",
            "Loss is NaN or Inf at step 5",
            rank=2,
            step=5,
            loss=float("nan"),
            kind="loss",
            inner_step=5,
        )
    )
    line = json_line(kept.records[0])
    head = ["ts", "level", "event", "msg", "run_id", "host", "rank"]
    document = json.loads(line)
    assert list(document)[:7] == head
    assert (document["level"], document["rank"], document["loss"]) == ("critical", 2, None)


def test_bytes_that_are_not_utf8_leave_a_document_readable() -> None:
    """A path in the miner's command must not make `status --json` unreadable for JSON parsers."""
    document = visible(json.dumps({"command": os.fsdecode(b"caf\xe9")}, ensure_ascii=False))
    assert json.loads(document.encode("utf-8")) == {"command": "caf\udce9"}


def test_an_exit_that_was_asked_for_has_no_cross_before_it() -> None:
    """An exit requested by the person on call must not look alarming."""
    console = Printing()
    exited = event("miner_exited", "error", "MINER EXITED: code 0 as asked: SIGINT", code=0)
    console.prints(exited.at("info"))
    console.prints(exited)
    assert "❌" not in console.lines[0]
    assert "❌ MINER EXITED" in console.lines[1]


def test_an_unknown_value_gets_no_check_mark() -> None:
    shown = diagnostics_block([{"rank": 0, "cuda_available": False, "world_size": 2}])
    assert "\n? Model device: unknown\n" in shown
    assert "\n✓ World size (GPUs): 2\n" in shown


@pytest.mark.parametrize("text", ["load", '{"load": 600}', "load=600,compile"])
def test_a_table_in_the_environment_is_taken_whole_or_refused(text: str) -> None:
    """Otherwise an allowance that somebody has set could be missing."""
    loaded = loading.load(env={"MINER_GUARD_HANG__PHASES": "load=600, compile=900"}).config
    assert loaded.hang.phases == {"load": 600.0, "compile": 900.0}
    with pytest.raises(BadConfig, match=r"hang\.phases = .*allowed: "):
        loading.load(env={"MINER_GUARD_HANG__PHASES": text})


def test_later_layers_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "guard.toml"
    file.write_text("[gate]\nmin_inner_step = 20\nrepo_age_limit_s = 2100\n")
    loaded = loading.load(
        file,
        profile={"gate": {"min_inner_step": 10, "repo_age_target_s": 1700.0}},
        env={"MINER_GUARD_GATE__REPO_AGE_LIMIT_S": "2200"},
        flags={"restart.max_restarts": 1},
    )
    gate = loaded.config.gate
    assert (gate.min_inner_step, gate.repo_age_target_s, gate.repo_age_limit_s) == (
        20,
        1700.0,
        2200.0,
    )
    assert loaded.config.restart.max_restarts == 1
    assert loaded.origins["gate.min_inner_step"] == str(file)
    assert loaded.origins["gate.mode"] == "default"


FULL = OSError(errno.ENOSPC, "No space left on device")


class Printing:
    """An emitter whose console lines are kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        sinks = [ConsoleSink(self.lines.append, LogSettings())]
        self._emitter = Emitter(FakeClock(), "r1", Redactor(), list(sinks))

    def prints(self, event: Event | None) -> bool:
        assert event is not None
        before = len(self.lines)
        self._emitter.emit(event)
        return len(self.lines) > before


def test_a_full_disk_is_reported_by_the_first_writer_alone_and_again_the_next_time() -> None:
    console = Printing()
    outages = {name: WriteOutage(name) for name in ("guard.jsonl", "host.json", "gate-inputs.json")}
    for _ in range(2):
        for outage in outages.values():
            console.prints(outage.failed(FULL))
        for name in ("guard.jsonl", "gate-inputs.json", "host.json"):
            console.prints(outages[name].succeeded())
        text = "DISK RECOVERED: writing host.json again, 2 lines lost"
        console.prints(event("disk_stuck", "info", text, lost=2))
    starts = [
        "FULL: cannot write guard.jsonl",
        "RECOVERED: writing guard.jsonl again, 0 lines lost",
        "RECOVERED: writing host.json again, 2 lines lost",
    ] * 2
    shown = [line.partition("DISK ")[2] for line in console.lines]
    assert [line[: len(start)] for line, start in zip(shown, starts, strict=True)] == starts


def test_data_lost_to_a_full_disk_is_reported_unless_the_disk_already_was() -> None:
    console, outage = Printing(), WriteOutage("guard.jsonl")
    lost, other = not_stored("evidence", FULL), not_stored("evidence", OSError(errno.EIO, "error"))
    # Room for a line does not mean room for evidence, and no other line reports that.
    assert console.prints(lost)
    assert console.prints(outage.failed(FULL))
    assert not console.prints(lost)
    assert console.prints(other)
    assert console.prints(outage.succeeded())
    assert console.prints(lost)


def test_secrets_are_gone_from_console_and_json(tmp_path: Path) -> None:
    printed: list[str] = []
    secret = "s3cr3t-value-of-the-environment"
    logs = LogSettings()
    jsonl = LogOnDisk(tmp_path / "guard.jsonl", logs)
    redactor = Redactor.from_environment({"R2_WRITE_SECRET": secret})
    emitter = Emitter(FakeClock(), "r1", redactor, [ConsoleSink(printed.append, logs), jsonl])
    emitter.emit(
        event(
            "rank_message",
            "info",
            f"key={secret} Bearer abcdefgh12345678",
            text=f"hf_{'a' * 30} {'0f' * 64} {secret}",
        )
    )
    stored = (tmp_path / "guard.jsonl").read_text()
    json.loads(stored)
    for planted in (secret, "abcdefgh12345678", "hf_aaaa", "0f0f0f"):
        assert planted not in stored
        assert planted not in printed[0]


def test_rotation_loses_no_line_and_every_line_parses(tmp_path: Path) -> None:
    logs = LogSettings(max_bytes=1000, keep=50)
    sink = LogOnDisk(tmp_path / "guard.jsonl", logs)
    emitter = Emitter(FakeClock(), "r1", Redactor(), [sink])
    for number in range(100):
        emitter.emit(event("rank_message", "info", str(number), text=str(number)))
    seen = {
        json.loads(line)["text"]
        for file in tmp_path.glob("guard.jsonl*")
        for line in file.read_text().splitlines()
    }
    assert seen == {str(n) for n in range(100)}


_FULL = OSError(errno.ENOSPC, "No space left on device")
_DENIED = OSError(errno.EACCES, "Permission denied")


def test_a_subject_is_reported_once_until_it_clears() -> None:
    once = Once()
    assert [once.first("disk"), once.first("disk"), once.first("memory")] == [True, False, True]
    assert once.clear("disk")
    assert not once.clear("disk")
    assert once.first("disk")
    assert sorted(map(str, once)) == ["disk", "memory"]
    # Memory must not grow with names that a miner makes up.
    once = Once(max_subjects=2)
    assert [once.first(name) for name in "abca"] == [True, True, False, False]


def test_a_report_repeats_after_its_interval_or_when_its_content_changes() -> None:
    per = OncePer(60.0)
    assert [per.ask(0.0, "a"), per.ask(59.9, "a"), per.ask(59.9, "b")] == [True, False, True]
    assert [per.ask(100.0, "b"), per.ask(119.9, "b")] == [False, True]
    assert (per.take_left_out(), per.take_left_out()) == (2, 0)
    per.clear()
    assert per.ask(120.0, "b")


@pytest.mark.parametrize(("error", "event"), [(_FULL, "disk_full"), (_DENIED, "guard_degraded")])
def test_an_outage_of_a_file_is_two_events(error: OSError, event: str) -> None:
    """There must be neither a line per failed write nor a recovery without a warning."""
    outage = WriteOutage("host.json")
    assert outage.succeeded() is None
    first = outage.failed(error)
    assert first is not None
    assert first.name == event
    assert outage.failed(error) is None
    back = outage.succeeded(2)
    assert back is not None
    assert (back.name, back.fields["lost"]) == (event, 2)
    assert outage.succeeded() is None


def test_a_single_lost_write_names_the_full_disk_in_a_field() -> None:
    assert not_stored("host.json", _FULL).fields["disk_full"] is True
    assert not_stored("host.json", _DENIED).fields["disk_full"] is False


def test_what_another_version_wrote_is_read_as_far_as_it_is_known() -> None:
    status = StatusDocument.from_json(
        {
            "restarts": None,
            "steps": None,
            "uploads": {"repo": [], "decision": {"allowed": False, "new": 1}},
            "ranks": {"cpu_fallback": {"0": {"verdict": "suspected"}}},
        }
    )
    assert status.restarts is None
    assert status.steps.p50_s is None
    assert status.uploads.repo.age_s is None
    assert status.uploads.decision is not None
    assert status.uploads.decision.allowed is False
    assert status.ranks.cpu_fallback["0"].verdict == "suspected"
    assert StatusDocument.from_json(status.to_json()).to_json() == status.to_json()


def test_a_missing_or_torn_file_is_not_a_document(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert read_status(state) is None
    state.db.write_text("no database")
    assert read_status(state) is None
    state.db.unlink()
    write_status(state.root, {"state": "running"})
    status = read_status(state)
    assert status is not None
    assert (status.state, status.gone, status.age_s < 5) == ("running", False, True)


def _names(section: type[Section]) -> set[str]:
    return {field.name for field in fields(section)}


def test_monitors_write_the_fields_that_readers_read(tmp_path: Path) -> None:
    """A field must not be renamed on one side only. The other sections are written through the
    model."""
    config = Config()
    health = HostMonitor(context(tmp_path, config=config, jobs=JobsNever()))
    chain = ChainMonitor(context(tmp_path, config=config, jobs=JobsNever()))
    assert _names(HealthStatus) == set(health.snapshot())
    assert {"block", "reason"} <= set(chain.snapshot()) & _names(ChainStatus)
    looked = chain_fields(ChainReading(reason=None))
    assert _names(ChainStatus) - {"reason", "outer_step", "unpaid"} <= {*looked, *chain.snapshot()}
