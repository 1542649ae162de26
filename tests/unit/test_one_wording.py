"""Every surface shows the same verdict in the same words: state, since when, cause, next step."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from miner_guard.cli import screen
from miner_guard.cli.screen import Curves
from miner_guard.config import GateSettings
from miner_guard.demo import summary
from miner_guard.eventlog.status_document import (
    StatusDocument,
    VerdictStatus,
    read_status,
    status_age_s,
)
from miner_guard.record.store import RunReader
from miner_guard.show import progress
from miner_guard.show.alerts import AlertsMonitor
from miner_guard.show.http import LiveReport, ServerSettings, Site, TimeRange
from miner_guard.show.report import render
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import parse_iso_utc
from miner_guard.watch.state import advice, headline, shown, state_since
from tests.support import simulated_guard
from tests.support.contexts import context
from tests.support.page_states import STATES
from tests.support.present_state import status_of, write_status
from tests.support.simulated_guard import SimulatedGuard

_GONE_S = 900.0
_SHORT = [name for name in STATES if name != "week"]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimulatedGuard]:
    with pytest.MonkeyPatch.context() as patch:
        # A third of the steps in the same hours.
        patch.setattr(simulated_guard, "STEP_S", 45.0)
        states = {name: STATES[name](tmp_path_factory.mktemp(name)) for name in _SHORT}
    for name, story in states.items():
        state = story.write()
        if name == "guard-gone":
            write_status(state.root, status_of(state.root), age_s=_GONE_S)
    return states


def _words(page: str) -> str:
    """The text of a page, as a person reads it."""
    text = re.sub(r"</?code>", "`", page.partition("<body>")[2])
    text = re.sub(r"<[^>]*>", " ", text)
    return " ".join(unescape(text).split())


def _of_status_endpoint(state: StateDir) -> VerdictStatus:
    site = Site(ServerSettings(str(state.root), "127.0.0.1", 0))
    answer = asyncio.run(site.status(Request({"type": "http"})))
    verdict = StatusDocument.from_json(json.loads(bytes(answer.body))).verdict
    assert verdict is not None
    return verdict


@pytest.mark.parametrize("name", _SHORT)
def test_all_surfaces_agree_word_for_word(stories: dict[str, SimulatedGuard], name: str) -> None:
    story = stories[name]
    state = story.state
    status = read_status(state)
    assert status is not None
    age_s = status_age_s(state)
    verdict = shown(status, age_s)
    line, step = headline(verdict), advice(verdict)

    top = screen.lines(status, Curves(), (400, 40), age_s=age_s)
    assert top[0] == line
    assert (top[1] == f"next   {step}") == bool(step)
    if name != "guard-gone":
        assert screen.status_lines(status, Curves(), [], 120)[: 1 + bool(step)] == [
            line,
            *([f"next   {step}"] if step else []),
        ]

    live = LiveReport(state, GateSettings()).render(TimeRange())
    for page in (_words(render(state)), _words(live)):
        first = page.index(state_since(verdict))
        assert first < page.index(str(verdict.cause)) < page.index("Next step")
        assert str(verdict.next_step or "nothing") in page

    assert progress.verdict_line(status, age_s, in_full=True) == line
    served = _of_status_endpoint(state)
    assert (headline(served), advice(served)) == (line, step)

    if name in ("guard-gone", "disk-full"):
        # The last verdict of the log is not the one shown: the guard is gone, or its disk is full.
        return
    alerts = AlertsMonitor(context(state.root, status=lambda: status_of(state.root)))
    alerts._memory = story.memory
    assert alerts._verdict() == line + (f"\nNext: {step}" if step else "")
    usage = summary.Usage(0.0, 1.0, 1.0)
    states = summary.summarise([e.record() for e in RunReader(state.db).events()], None, usage)
    assert str(states.verdict).partition(": ")[0] == state_since(verdict)


@pytest.mark.parametrize("name", _SHORT)
def test_log_ledger_status_and_verdict_agree(stories: dict[str, SimulatedGuard], name: str) -> None:
    """A contradiction in the pictures would be a contradiction in the guard."""
    state = stories[name].state
    status, records = read_status(state), [e.record() for e in RunReader(state.db).events()]
    assert status is not None
    assert status.verdict is not None

    def of(*events: str) -> list[Mapping[str, Any]]:
        return [record for record in records if record["event"] in events]

    pushes = RunReader(state.db).rows("upload")
    assert len(pushes) == len(of("upload_succeeded"))
    if status.uploads.upload is not None and name != "disk-full":
        assert status.uploads.upload.tag == pushes[-1]["tag"]
    assert status.restarts == len(of("miner_restarting"))
    assert len(of("miner_started")) == 1 + len(of("miner_restarting"))
    assert not of("guard_degraded")
    assert status.updated is not None
    assert records[-1]["ts"] <= status.updated
    if of("loss_nan"):
        step, outer = (of("loss_nan")[0][key] for key in ("step", "outer_step"))
        assert f"since step {step} of outer step {outer}" in str(status.verdict.cause)
    if of("verdict_changed") and name not in ("disk-full", "guard-gone"):
        last = of("verdict_changed")[-1]
        assert (last["state"], last["since"]) == (status.verdict.state, status.verdict.since)
    begins = {
        "hang_detected": "hang",
        "loss_nan": "nan",
        "crash_loop": "crash-loop",
        "straggler": "ranks-16",
        "cpu_fallback": "no-gpu",
    }
    assert {begins[event] for event in begins if of(event)} <= {name}
    if name == "disk-full":
        assert records[-1]["ts"] <= str(status.verdict.since), "a full disk takes no further line"
        assert pushes[-1]["wall"] <= parse_iso_utc(str(status.verdict.since))


def test_the_live_page_itself_has_the_words_for_a_port_that_does_not_answer(tmp_path: Path) -> None:
    """The script shows them when nothing can be fetched anymore, so they are part of the page."""
    site = Site(ServerSettings(str(tmp_path), "127.0.0.1", 0))
    page = _words(site._page)
    gone = shown(StatusDocument(state="running", updated="x"), _GONE_S)
    assert str(gone.next_step) in page
    assert "{{" not in page
