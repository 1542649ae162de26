"""The report in a real browser: nothing overflows on a phone, curves are drawn, dark mode is dark,
and the page requests nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miner_guard.show.report import render
from tests.support.guard_log import Log
from tests.support.present_state import write_status


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 300 steps, slow ones, a restart, uploads, GPU figures and costs."""
    root = tmp_path_factory.mktemp("report")
    log = Log(root / "state")
    state, clock, say = log.state, log.clock, log.say
    for step in range(1, 301):
        clock.advance(15)
        figures = {
            "lr": 1e-4,
            "loss": 5 - step / 100,
            "step_time_s": 15 + step % 3,
            "gpu_mem_gb": 18.4,
        }
        say("inner_step", outer_step=1, inner_step=step, **figures)
        if step % 50 == 0:
            say(
                "slow_step",
                step_time_s=70.0,
                expected="10-30s",
                inner_step=step,
                limit_s=60,
                rule="absolute",
            )
            say("upload_succeeded", tag=f"1.1.{step}", detail="read back, " + "x" * 200)
        if step % 4 == 0:
            gpus = {"gpus": [{"memory_used_bytes": 18e9, "utilization_ratio": 0.9}]}
            uploads = {"repo": {"age_s": 15.0 * (step % 50)}}
            say(
                "health_snapshot",
                summary="x",
                snapshot={"gpus": gpus, "uploads": uploads, "miner": {"goodput": 0.9}},
            )
    say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="crash")
    steps = {"total_steps": 300, "goodput": {"training": 0.9, "upload": 0.1}}
    write_status(state.root, {"state": "running", "steps": steps})
    file = root / "report.html"
    file.write_text(render(state))
    return file


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark"), (320, "light")])
def test_the_page_fits_and_draws(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request",
        lambda request: errors.append(request.url) if request.url.startswith("http") else None,
    )
    page.goto(page_file.as_uri())
    assert errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    lines = page.evaluate(
        "[...document.querySelectorAll('path.line')].map(p => p.getTotalLength())"
    )
    assert len(lines) == 7, "loss and its smoothed line, step time, repo age, GPUs, goodput"
    assert min(lines) > 500
    assert page.locator("path.dot.warn").count() == 1
    assert page.locator("path.vertical.good").count() == 1
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = int(background.removeprefix("rgb(").split(",")[0]) > 128
    assert bright == (scheme == "light")
    sizes = page.evaluate(
        "[...document.querySelectorAll('.y span')].map(e => "
        "parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 10, "axis labels stay readable at every width"
    context.close()


def test_a_curve_shows_values_by_pointer_and_by_key(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.goto(page_file.as_uri())
    area = page.locator(".area").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    words = area.locator("output").inner_text()
    # Step 150 of 300: the loss is 5 - 150 / 100.
    assert re.match(r"loss 3\.\d+, smoothed 3\.\d+ at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC$", words)
    cursors = page.evaluate(
        "[...document.querySelectorAll('.cursor')].map(c => c.getAttribute('d'))"
    )
    assert len(set(cursors)) == 1, "the cursor is at the same time in all curves"
    area.focus()
    page.keyboard.press("ArrowRight")
    assert area.locator("output").inner_text() != words
    page.close()


def test_dragging_zooms_all_curves_and_a_double_click_shows_all_again(
    browser: Any, page_file: Path
) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.goto(page_file.as_uri())
    views = "[...document.querySelectorAll('.area svg')].map(s => s.getAttribute('viewBox'))"
    whole, labels = page.evaluate(views), page.locator(".x").first.inner_text()
    area = page.locator(".area").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=4)
    page.mouse.up()
    (view,) = set(page.evaluate(views))
    left, _, width, _ = (float(part) for part in view.split())
    assert (left, width) == (pytest.approx(250, abs=3), pytest.approx(250, abs=3))
    assert page.locator(".x").first.inner_text() != labels
    area.dblclick(position={"x": 50, "y": 50})
    assert page.evaluate(views) == whole
    area.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    assert page.evaluate(views) != whole, "the keyboard zooms too"
    page.close()
