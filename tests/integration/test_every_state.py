"""Fifteen states of a run, each by a real guard over a small miner, and what every surface says of
them: console, status, top, JSON, the page live and saved, the health endpoint, metrics, alerts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miner_guard.record.store import RunReader
from tests.servers.webhook import Webhook
from tests.support import requires
from tests.support.real_states import (
    STATES,
    RealState,
    Running,
    Shown,
    disagreements,
    first_part,
    rounded,
    surfaces,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_WITHIN_S = 180.0
_SETTLED_S = 8.0
"""The log tells of a state that has held for five seconds."""


@dataclass
class Story:
    """What was seen of one run until it was in its state for `_SETTLED_S`."""

    running: Running
    wrong: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    """The first words of each state on the way."""

    last: Mapping[str, Shown] = field(default_factory=dict)
    exact: int = 0
    """How often every surface was read in the state while the guard wrote nothing."""

    since: float | None = None
    console: str = ""

    def look(self) -> bool:
        """Read every surface once; returns whether the state is settled and was seen exactly."""
        self.running.act()
        looked = surfaces(self.running.guard.state)
        if looked is None:
            return False
        self.last, exact = looked
        shown, state = self.last["status"], self.running.state
        words = first_part(shown.sentence)
        self.seen += [words] if self.seen[-1:] != [words] else []
        self.wrong += [f"{words}: {each}" for each in disagreements(self.last, exact=exact)]
        if words != state.words or state.cause not in shown.sentence:
            self.since, self.exact = None, 0
            return False
        self.since, self.exact = self.since or time.monotonic(), self.exact + exact
        if time.monotonic() - self.since < _SETTLED_S or not self.exact:
            return False
        self.console = self.running.console
        self.running.guard.clean()
        return True


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    """All runs, side by side."""
    requires.module("apprise")
    requires.module("uvicorn")
    webhook, stories = Webhook(), {}
    small = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        for state in STATES:
            if state.name != "disk full" or mounted:
                folder = tmp_path_factory.mktemp(state.name.replace(" ", "-"))
                stories[state.name] = Story(Running(state, folder, webhook, small))
        deadline, open_ones = time.monotonic() + _WITHIN_S, list(stories.values())
        while open_ones and time.monotonic() < deadline:
            open_ones = [story for story in open_ones if not story.look()]
        yield stories
    finally:
        for story in stories.values():
            story.running.guard.clean()
        if mounted:
            subprocess.run(["umount", "-l", str(small)], check=True)
        webhook.close()


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_every_surface_says_the_same_of_a_real_run(
    stories: dict[str, Story], state: RealState
) -> None:
    if state.name not in stories:
        pytest.skip("a small file system can't be mounted here")
    story = stories[state.name]
    shown = story.last["status"]
    assert (first_part(shown.sentence), shown.colour, shown.life) == (
        state.words,
        state.colour,
        state.life,
    ), story.seen
    assert state.cause in shown.sentence
    assert (story.last["json"].earning or "") == state.earning
    assert story.wrong == []
    assert set(story.last) >= {"status", "top", "json", "report"}
    assert bool(shown.age) == state.ended, "an age where the figures are not of now"
    assert shown.earns.startswith(state.earning or "nothing is published")
    assert shown.next
    red = [name for name, surface in story.last.items() if surface.red]
    assert state.colour in ("red", "yellow") or red == [], "nothing is red while nothing is wrong"
    if not state.ended:
        assert set(story.last) >= {"page", "/status", "metrics", "healthz"}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_the_console_and_the_alert_tell_of_it_once(
    stories: dict[str, Story], state: RealState
) -> None:
    if state.name not in stories:
        pytest.skip("a small file system can't be mounted here")
    story = stories[state.name]
    shown, running = story.last["status"], story.running
    told = [row.partition("VERDICT: ")[2] for row in story.console.splitlines() if "VERDICT" in row]
    if state.name != "guard killed":
        # The miner's pause began after the line.
        assert rounded(told[-1]).startswith(rounded(shown.sentence).partition("; in val")[0])
    words = [first_part(row) for row in told]
    assert words == list(dict.fromkeys(words)) or state.name == "crash loop", "one line per change"
    over = [body for body in running.alerts if "RESOLVED" in body["title"]]
    assert over == [], "no state has ended"
    messages = running.alerts
    titles = [body["title"] for body in messages]
    if not state.alert:
        assert titles == []
        return
    path = state.name.replace(" ", "-")
    assert titles[-1].startswith(f"{path}: {state.words}: {state.alert}")
    assert len(titles) == (2 if state.name == "crash loop" else 1), titles
    for answer in (shown.sentence, f"Earning: {shown.earns}", f"Next: {shown.next}"):
        assert rounded(answer) in rounded(messages[-1]["message"])


def test_the_next_guard_tells_of_a_killed_one_and_continues_its_figures(tmp_path: Path) -> None:
    """Its events once came before the monitors, and all earlier training counted as `init`."""
    requires.module("apprise")
    webhook, plain = Webhook(), STATES[-1]
    running = Running(plain, tmp_path, webhook, tmp_path)
    guard = running.guard

    def steps() -> dict[str, Any]:
        return RunReader(guard.state.db).now().get("steps") or {}

    try:
        until(lambda: (steps().get("steps") or 0) > 15, 60, guard.tail)
        before, killed = steps(), guard.guard_pid
        os.kill(killed, signal.SIGKILL)
        until(lambda: running.alerts, 20, guard.tail)
        until(lambda: (steps().get("total_steps") or 0) > before["total_steps"], 20, guard.tail)
        (alert,) = running.alerts
        assert alert["title"].startswith("plain-trainer: TRAINING: GUARD KILLED: the guard before")
        assert all(w in alert["message"] for w in ("miner kept running", "Next: find out what"))
        assert steps()["loss_first"] == before["loss_first"] == 4.0
        assert steps()["goodput_s"] > before["goodput_s"]
        assert steps()["goodput"]["training"] > 0.5
    finally:
        guard.clean()
        webhook.close()
