"""A monitor that fails is reported once; the other monitors and the supervisor continue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from miner_guard.rank.layout import Now
from miner_guard.record.events import Event, event
from miner_guard.watch.base import Context, Monitor
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
