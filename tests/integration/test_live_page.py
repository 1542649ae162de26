"""The live page in a real browser: if the port needs a token, the page asks for it once and sends
it only as a header."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.guard_log import Log
from tests.support.http_port import Port
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TOKEN = "tökén & more"
RUN = "run-of-the-test"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    opened = Port(tmp_path, TOKEN)
    opened.status(run_id=RUN)
    yield opened
    opened.close()


@pytest.fixture
def open_port(tmp_path: Path) -> Iterator[Port]:
    opened = Port(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab whose clock the test controls. `asked` lists the addresses that it requested, `errors`
    the errors of its scripts."""
    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    page.asked, page.errors = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            page.errors.append(message.text) if "Security Policy" in message.text else None
        ),
    )
    yield page
    context.close()


def _enter(tab: Any, token: str) -> None:
    tab.locator("#token").fill(token)
    tab.get_by_role("button", name="Open").click()


def test_the_token_is_asked_for_once_and_is_in_no_address(port: Port, tab: Any) -> None:
    assert tab.goto(port.url).status == 200
    tab.locator("form").wait_for()
    assert RUN not in tab.content()
    _enter(tab, "wrong")
    tab.get_by_text("Wrong token; try again.").wait_for()
    _enter(tab, f" {TOKEN}\n")
    tab.get_by_text(RUN).wait_for()
    assert tab.locator("form").is_hidden()
    assert " · " in tab.title()

    tab.reload()
    tab.get_by_text(RUN).wait_for()
    asked = {url for url in tab.asked if not url.startswith("data:")}
    assert asked == {f"{port.url}/", f"{port.url}/data?range=24h"}
    assert tab.context.cookies() == []
    assert tab.evaluate("localStorage.length") == 0
    assert TOKEN not in tab.content()
    assert tab.errors == []


def test_a_second_tab_asks_for_the_token_again(port: Port, tab: Any) -> None:
    tab.goto(port.url)
    _enter(tab, TOKEN)
    tab.get_by_text(RUN).wait_for()
    other = tab.context.new_page()
    other.goto(port.url)
    other.locator("form").wait_for()
    assert RUN not in other.content()


def test_the_page_updates_itself_and_shows_when_the_guard_is_gone(port: Port, tab: Any) -> None:
    tab.goto(port.url)
    _enter(tab, TOKEN)
    tab.get_by_text(RUN).wait_for()
    port.status(run_id="the-next-run")
    tab.clock.run_for(11_000)
    tab.get_by_text("the-next-run").wait_for()
    tab.clock.run_for(3_000)
    tab.get_by_text("Last updated").wait_for()
    port.close()
    tab.clock.run_for(11_000)
    tab.get_by_text("The guard is not responding").wait_for()
    assert "the-next-run" in tab.content(), "what was known last stays to be read"
    assert tab.get_by_label("The guard is gone").inner_text().startswith("GUARD GONE since ")
    marked = "getComputedStyle(document.querySelector('#head .state h1'), '::before').content"
    assert tab.evaluate(marked) == '"Last known: "', "EARNING must not stand there as if it were"


def test_the_page_recovers_when_the_guard_does(tmp_path: Path, tab: Any) -> None:
    """Otherwise somebody would have to reload the tab after each restart of the guard."""
    first = Port(tmp_path)
    first.status(run_id=RUN)
    tab.goto(first.url)
    tab.get_by_text(RUN).wait_for()
    first.close()
    tab.clock.run_for(11_000)
    tab.get_by_text("The guard is not responding").wait_for()
    second = Port(tmp_path, port=first.number)
    try:
        second.status(run_id="after-the-restart")
        tab.clock.run_for(11_000)
        tab.get_by_text("after-the-restart").wait_for()
        assert tab.get_by_label("The guard is gone").is_hidden()
    finally:
        second.close()


def test_a_selection_survives_an_update(open_port: Port, tab: Any) -> None:
    """An update must not take away text that a person is about to copy."""
    open_port.status(run_id=RUN)
    tab.goto(open_port.url)
    tab.get_by_text(RUN).wait_for()
    tab.evaluate("getSelection().selectAllChildren(document.querySelector('.about'))")
    open_port.status(run_id="the-next-run")
    tab.clock.run_for(25_000)
    tab.wait_for_timeout(300)
    assert RUN in tab.evaluate("getSelection().toString()")
    tab.evaluate("getSelection().removeAllRanges()")
    tab.clock.run_for(11_000)
    tab.get_by_text("the-next-run").wait_for()
    assert tab.errors == []


def _span_s(tab: Any) -> float:
    """The seconds that the curves cover."""
    return float(tab.evaluate("extent[1] - extent[0]"))


def test_a_zoom_asks_for_that_time_and_zooms_out_again(
    open_port: Port, tmp_path: Path, tab: Any
) -> None:
    log = Log(tmp_path)
    for number in range(200):
        log.step(number, loss=3.0 + number / 100)
    open_port.status(run_id=RUN)
    tab.goto(open_port.url)
    tab.get_by_text(RUN).wait_for()
    area = tab.locator(".u-over").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 30, steps=3)
    tab.mouse.up()
    tab.get_by_role("button", name="Zoom out").wait_for()
    asked = [url for url in tab.asked if "from=" in url]
    assert len(asked) == 1
    start, end = map(float, re.findall(r"=([\d.]+)", asked[0]))
    assert end - start == pytest.approx(0.4 * 199 * 15, rel=0.1)
    until(lambda: _span_s(tab) < 1500, what="the finer curves")
    tab.get_by_role("button", name="Zoom out").click()
    until(lambda: _span_s(tab) > 2900, what="the whole range")
    assert tab.errors == []


def test_the_state_stands_first(open_port: Port, tab: Any) -> None:
    verdict = {
        "life": "hung",
        "colour": "red",
        "since": "2026-01-02T12:03:04Z",
        "cause": "rank 1 in data for 912s",
        "next_step": "read the stacks",
        "event": "hang_detected",
    }
    open_port.status(verdict=verdict)
    tab.goto(open_port.url)
    banner = tab.get_by_label("State", exact=True)
    banner.wait_for()
    shown = banner.inner_text()
    assert shown.startswith("HUNG since ")
    for answer in ("rank 1 in data for 912s", "read the stacks", "hang_detected"):
        assert answer in shown
    top = tab.evaluate("document.querySelector('#head .state').getBoundingClientRect().top")
    tiles = tab.evaluate("document.querySelector('.tiles').getBoundingClientRect().top")
    assert top < tiles
    banner.get_by_role("link", name="hang_detected").click()
    row = tab.locator("#runbook-hang_detected")
    assert "names the rank and its phase" in row.inner_text()
    assert tab.evaluate(
        "document.querySelector('#runbook-hang_detected').getBoundingClientRect().top"
        " < window.innerHeight"
    ), "the link leads to the row, without a request"


def test_text_from_the_log_runs_no_script_in_the_page(port: Port, tab: Any) -> None:
    """The page shows such text as text; even if it did not, the policy would still forbid the
    script."""
    port.status(run_id="<img src=x onerror='window.broken=1'><script>window.broken=1</script>")
    answer = tab.goto(port.url)
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]
    _enter(tab, TOKEN)
    tab.get_by_text("<script>window.broken=1</script>").wait_for()
    tab.evaluate(
        "document.querySelector('#head').innerHTML = '<img src=data: onerror=window.broken=1>'"
    )
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.broken") is None
    tab.goto("about:blank")
    tab.set_content("<img src=data: onerror=window.broken=1>")
    tab.wait_for_function("window.broken === 1")  # The attack works.


def test_without_a_token_the_page_is_there_at_once_and_its_policy_hinders_nothing(
    open_port: Port, tab: Any
) -> None:
    open_port.status(run_id=RUN, steps={"goodput": {"training": 0.75}})
    assert tab.goto(open_port.url).status == 200
    assert 'http-equiv="refresh"' not in tab.content()
    tab.get_by_text(RUN).wait_for()
    bar = "document.querySelector('.bar i').getBoundingClientRect()"
    assert tab.evaluate(f"{bar}.width") > 500
    assert tab.errors == []


def test_an_update_keeps_scroll_and_open_sections_and_requests_the_range(
    tmp_path: Path, tab: Any
) -> None:
    """The page must not jump back to the top every ten seconds."""
    log = Log(tmp_path)
    for number in range(1, 120):
        log.step(number)
        log.snapshot(100.0)
    port = Port(tmp_path, gate={"repo_age_limit_s": 777.0})
    try:
        port.status(run_id=RUN)
        tab.set_viewport_size({"width": 800, "height": 500})
        tab.goto(port.url)
        tab.get_by_text(RUN).wait_for()
        tab.get_by_text("Milestones", exact=True).click()
        tab.evaluate("scrollTo(0, 600)")
        port.status(run_id="the-next-run")
        tab.clock.run_for(11_000)
        tab.get_by_text("the-next-run").wait_for()
        assert abs(tab.evaluate("scrollY") - 600) < 60, "the header may have grown by a line"
        assert tab.locator("details[open] > summary", has_text="Milestones").count() == 1
        assert "777" in tab.locator("figure", has_text="repo age").inner_text().lower(), (
            "the limit of [gate] and not the default"
        )
        for label, name in (("1 h", "1h"), ("6 h", "6h"), ("7 d", "7d"), ("All", "all")):
            tab.get_by_role("button", name=label, exact=True).click()
            until(lambda name=name: f"range={name}" in tab.asked[-1], what=name)
        reloads = [url for url in tab.asked if url.rstrip("/") == port.url]
        assert len(reloads) == 1, "it fetches and never reloads"
        assert tab.errors == []
    finally:
        port.close()
