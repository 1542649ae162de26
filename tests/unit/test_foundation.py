"""Lines, settings and the pipeline of the log agree with their contracts."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from miner_guard.checks.ranks import diagnostics_block
from miner_guard.config import BadConfig, LogSettings, loading
from miner_guard.record.emitter import ConsoleSink, Emitter
from miner_guard.record.events import Event, WriteOutage, event, not_stored
from miner_guard.record.redaction import Redactor
from miner_guard.system.clock import FakeClock
from tests.support.simulated_parts import LogOnDisk


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
