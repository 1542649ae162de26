"""The event log's pipeline is structlog's, without asyncio."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import structlog

from miner_guard.record.emitter import Emitter, Record, bound_contextvars
from miner_guard.record.events import event
from miner_guard.record.lines import json_line
from miner_guard.record.redaction import MASK, Redactor
from miner_guard.record.words import visible
from miner_guard.system.clock import FakeClock


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
