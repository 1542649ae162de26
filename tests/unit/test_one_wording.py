"""Every surface shows the same verdict in the same words: state, since when, cause, next step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from miner_guard.cli import screen
from miner_guard.cli.screen import Curves
from miner_guard.config import AlertSettings, Config, GateSettings, HttpSettings
from miner_guard.record.events import event
from miner_guard.record.status_document import StatusDocument, read_status
from miner_guard.show import metrics
from miner_guard.show.alerts import Alert, AlertsMonitor
from miner_guard.show.http import Site
from miner_guard.show.metrics import LEVELS
from miner_guard.show.page import KINDS, document, html
from miner_guard.state_dir import StateDir
from miner_guard.watch.base import Context
from miner_guard.watch.state_words import (
    WORST_FIRST,
    advice,
    find_the_guard,
    freshness,
    headline,
    read_state,
    state_since,
    time_of_reading,
)
from tests.support.contexts import context
from tests.support.present_state import write_status
from tests.support.run_states import SITUATIONS, Situation


def _served(state: StateDir) -> tuple[StatusDocument, dict[str, Any], str, int]:
    """`/status` parsed and as JSON, `/healthz` and its code."""
    site = Site(state, HttpSettings(port=0), GateSettings())
    served = json.loads(bytes(asyncio.run(site.status(Request({"type": "http"}))).body))
    health = asyncio.run(site.healthz(Request({"type": "http"})))
    return StatusDocument.from_json(served), served, bytes(health.body).decode(), health.status_code


@pytest.mark.parametrize("gone", [False, True], ids=["live", "gone"])
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_every_surface_says_the_same_of_a_recorded_state(
    tmp_path: Path, situation: Situation, gone: bool
) -> None:
    """The report once said EARNING, `top` EARNING (old) and `status` killed, of one killed
    guard."""
    written = situation.document()
    gone = gone and written["state"] != "done"
    write_status(tmp_path, written, age_s=37.0 if gone else 0.0)
    state, status = StateDir(tmp_path), read_status(StateDir(tmp_path))
    assert status is not None
    words = "GUARD GONE" if gone else situation.words
    colour = "red" if gone else situation.colour
    shown = read_state(status)
    line, step = headline(shown, time_of_reading(status)), advice(shown)
    assert line.startswith(f"{words} since 03:0")

    top = screen.lines(status, Curves(), (900, 60))
    listed = screen.status_lines(status, Curves(), [], 120)
    for rows in (top, listed):
        assert rows[0] == line
        assert (rows[1] == f"next   {step}") == bool(step)
    painted = screen.painted(listed, colour)
    assert WORST_FIRST[screen.urgency(status)] == colour
    assert str(painted.plain).startswith(line)

    page = document(state, GateSettings())
    assert page["title"].startswith(f"{words} · ")
    assert page["state"] == {
        "kind": KINDS[colour],
        "line": state_since(shown, time_of_reading(status)),
        "age": freshness(status),
        "cause": shown.cause,
        "next": shown.next_step or "nothing",
        "event": shown.event,
    }

    parsed, served, health, code = _served(state)
    assert parsed.verdict is not None
    assert (headline(parsed.verdict), advice(parsed.verdict)) == (headline(shown), step)
    life = "guard gone" if gone else situation.life
    assert (served["life"], served["as_of"]) == (life, written["updated"])
    assert (served["health"]["state"], served["earning"]) == (shown.health, shown.earning)
    assert health.splitlines()[0] == headline(shown)
    assert (code == 200) == (life == "training" or (situation.name == "first minute" and not gone))

    numbers = metrics.exposition(status, version="1")[0].decode()
    assert f"minerguard_verdict_level {float(LEVELS[colour])}" in numbers
    assert f'minerguard_life{{life="{life}"}} 1.0' in numbers
    if not gone:
        alerts = AlertsMonitor(_alerting(tmp_path, written))
        sent: list[Alert] = []
        alerts._targets[0].put = sent.append  # type: ignore[method-assign]
        alerts.on_event(event("incident", "critical", "INCIDENT x: y"))
        alerts.on_stop()
        (message,) = sent
        state_line = headline(shown, written["updated"])
        assert message.body.splitlines() == [
            "INCIDENT x: y",
            state_line,
            *([f"Next: {step}"] if step else []),
        ]


def _alerting(folder: Path, document: Mapping[str, Any]) -> Context:
    config = Config(alerts=AlertSettings(urls=("json://127.0.0.1:9/",)))
    return context(folder, config=config, status=lambda: document)


def test_the_live_page_itself_has_the_words_for_a_port_that_does_not_answer() -> None:
    """The script shows them when nothing can be fetched anymore, so they are part of the page."""
    assert escape(find_the_guard()) in html(None)
