"""axe-core finds no violation on any page, in light, in dark and on a phone: the report, the live
page, the page that asks for its token, the page of a guard that is gone, and the documentation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.show.page import render
from miner_guard.system.clock import iso_utc
from tests.support import requires
from tests.support.guard_log import Log
from tests.support.http_port import Port
from tests.support.present_state import write_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light")}
OURS = ["dark", "phone"]
"""How to render our own pages: `dark` has the wide layout, `phone` the light colours."""

REPORTS = [(name, look) for name in ("hang", "ranks", "gone") for look in OURS]
REPORTS.append(("hang", "light"))
"""Parts that a phone hides: table headings, hints and some labels."""

_GONE_S = 900.0
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, as installed by `npm install --global axe-core`."""
    root = (
        os.environ.get("AXE_CORE")
        or subprocess.run(
            [requires.tool("npm"), "root", "--global"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    script = Path(root) / "axe-core" / "axe.min.js"
    if not script.is_file():
        requires.missing("axe-core is not installed: npm install --global axe-core")
    return script.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directories of three miners: one that hangs, one with sixteen ranks, one without a
    guard; each with every section of the page."""
    folder = tmp_path_factory.mktemp("states")
    ranks = {str(n): {"work_s": 14.0 + (n == 12), "step_time_s": 15.0} for n in range(16)}
    steps = {"steps": 90, "loss": 3.1, "p50_s": 15.0, "goodput": {"training": 0.9, "hang": 0.1}}
    hung = {"life": "hung", "colour": "red", "cause": "rank 1", "event": "hang_detected"}
    well = {"life": "training", "colour": "green", "cause": "training", "event": "straggler"}
    for name, verdict in (("hang", hung), ("ranks", well), ("gone", well)):
        log = Log(folder / name)
        for number in range(90):
            log.step(number)
            log.snapshot(100.0)
        told = {"culprits": [1], "frames": {"1": "train.py:212"}, "idle_s": 45.0}
        log.say("hang_detected", detail="rank 1 in data for 45s", **told)
        log.say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="hang")
        if name == "ranks":
            log.step(90)
        for number in range(20):
            log.say("upload_failed", reason=f"refused {'x' * number}")
        verdict = {**verdict, "changes": [(log.clock.wall() - 9000, "green")]}
        document = {"state": "running", "steps": {**steps, "per_rank": ranks}, "verdict": verdict}
        gpus = {"gpus": {"state": "ok", "gpus": [{"index": 0, "state": "lost"}]}}
        document |= {"health": gpus, "updated": iso_utc(log.clock.wall())}
        write_status(log.state.root, document, age_s=_GONE_S if name == "gone" else 0.0)
        (folder / f"{name}.html").write_text(render(log.state), encoding="utf-8")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def violations(page: Any, axe: str) -> list[str]:
    """The violations that axe reports, with the first element of each."""
    page.evaluate(axe)
    found = page.evaluate("(tags) => axe.run({runOnly: tags}).then((r) => r.violations)", TAGS)
    return [f"{v['id']}: {v['help']}: {v['nodes'][0]['html'][:200]}" for v in found]


def _page(browser: Any, look: str) -> Any:
    width, scheme = LOOKS[look]
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True
    )
    return context.new_page()


@pytest.mark.parametrize(("name", "look"), REPORTS)
def test_the_report_has_no_accessibility_violation(
    browser: Any, axe: str, states: Path, name: str, look: str
) -> None:
    page = _page(browser, look)
    page.goto((states / f"{name}.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.locator(".incident, .week, .tile, .area, .ranks, table.runbook").count() > 10
    assert violations(page, axe) == []
    page.context.close()


@pytest.mark.parametrize("look", OURS)
def test_the_live_page_has_no_violation_with_a_token_or_without_a_guard(
    browser: Any, axe: str, states: Path, look: str
) -> None:
    port = Port(states / "hang", "the token of the test")
    page = _page(browser, look)
    page.clock.install()
    page.goto(port.url)
    page.locator("form").wait_for()
    assert violations(page, axe) == []
    page.locator("#token").fill("the token of the test")
    page.get_by_role("button", name="Open").click()
    page.locator("figure").first.wait_for()
    assert violations(page, axe) == []
    port.close()
    page.clock.run_for(11_000)
    page.get_by_text("The guard is not responding").wait_for()
    assert violations(page, axe) == []
    page.context.close()


ELEMENTS = ("howto/not-earning", "screens", "reference/settings")
"""Pages that together contain every kind of element: lists, code, notes, pictures, tables."""

PAGES = ("", "concepts", "faq", "runbook", "reference/events", *ELEMENTS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requires.module("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=requires.REPO, check=True, timeout=200, env=environment)
    return folder


@pytest.mark.parametrize("look", LOOKS)
def test_the_documentation_has_no_accessibility_violation(
    browser: Any, axe: str, site: Path, look: str
) -> None:
    page = _page(browser, look)
    for name in PAGES if look == "light" else ELEMENTS:
        page.goto((site / name / "index.html").as_uri())
        assert violations(page, axe) == [], name
    page.context.close()
