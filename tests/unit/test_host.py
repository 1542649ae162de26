"""A monitor that fails is reported once; the other monitors and the supervisor continue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.rank.layout import Now
from miner_guard.watch.base import Context, Monitor
from miner_guard.watch.runner import MonitorRunner


class Broken(Monitor):
    name = "broken"

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        raise ValueError("no such thing")

    def snapshot(self) -> Mapping[str, Any]:
        raise KeyError("nor this")


class Talkative(Monitor):
    name = "talkative"

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        return [make_finding("rank_message", text="tick")]

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        return [make_finding("rank_message", text=f"heard {finding.fields['text']}")]

    def snapshot(self) -> Mapping[str, Any]:
        return {"fine": True}


def host(*monitors: type[Monitor]) -> tuple[MonitorRunner, list[Finding]]:
    logged: list[Finding] = []
    made = MonitorRunner(logged.append)
    made.monitors = [monitor(cast(Context, None)) for monitor in monitors]
    return made, logged


def test_a_part_that_fails_is_reported_once_and_the_others_continue() -> None:
    made, logged = host(Broken, Talkative)
    for now in range(3):
        made.tick(float(now), {})
    assert [f.event for f in logged].count("guard_degraded") == 1
    assert "broken.on_tick failed with ValueError: no such thing" in logged[0].fields["what"]
    assert [f.fields["text"] for f in logged if f.event == "rank_message"] == ["tick"] * 3


def test_a_snapshot_that_fails_is_unknown_not_absent() -> None:
    made, _ = host(Broken, Talkative)
    assert made.snapshots() == {"broken": None, "talkative": {"fine": True}}


def test_findings_that_lead_to_findings_come_to_an_end() -> None:
    made, logged = host(Talkative, Talkative)
    made.finding(make_finding("rank_message", text="start"))
    assert 3 <= len(logged) < 100
