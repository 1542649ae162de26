"""The report in a real browser: nothing overflows on a phone, curves are drawn, dark mode is dark,
and the page requests nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miner_guard.show.page import render
from tests.support.guard_log import Log
from tests.support.present_state import write_status


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 300 steps, slow ones, a restart, uploads, GPU figures and costs."""
    root = tmp_path_factory.mktemp("report")
    log = Log(root / "state")
    for step in range(1, 301):
        log.step(step, loss=5 - step / 100)
        if step % 50 == 0:
            log.say("slow_step", step_time_s=70.0, inner_step=step)
            log.say("upload_succeeded", tag=f"1.1.{step}", detail="read back, " + "x" * 200)
        if step % 4 == 0:
            log.snapshot(15.0 * (step % 50))
    log.say("incident", label="cuda_oom", cause="out of memory", fix="Halve the batch")
    log.say("miner_restarting", wait_s=2, attempt=1, max_restarts=5, cause="crash")
    ranks = {str(rank): {"work_s": 14.0, "step_time_s": 15.0} for rank in range(16)}
    goodput = {"training": 0.9, "upload": 0.1}
    steps = {"total_steps": 300, "goodput": goodput, "per_rank": ranks}
    write_status(log.state.root, {"state": "running", "steps": steps})
    file = root / "report.html"
    file.write_text(render(log.state))
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
    drawn = "plots.map(({u, curve}) => [curve.title, u.data[0].length, u.width, u.height])"
    curves = {title: numbers for title, *numbers in page.evaluate(drawn)}
    assert list(curves) == ["Loss", "Step time", "Repo age", "GPU memory", "GPU use"]
    assert curves["Loss"][0] >= 300
    assert min(wide for _, wide, _ in curves.values()) > 200
    assert page.locator("figcaption", has_text="slow step").count() == 1
    card = page.locator("details.incident[open]")
    assert "Halve the batch" in card.inner_text(), "an open incident shows what to do"
    assert page.locator("figcaption", has_text="verified").count() == 1
    ink = (
        "[...document.querySelector('canvas').getContext('2d').getImageData(60, 20, 200, 150).data]"
    )
    assert page.evaluate(f"new Set({ink}).size") > 3, "something is drawn"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = int(background.removeprefix("rgb(").split(",")[0]) > 128
    assert bright == (scheme == "light")
    context.close()


def test_state_loss_step_time_and_ranks_are_on_the_first_screen(
    browser: Any, page_file: Path
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(page_file.as_uri())
    for label in ("State", "Figures"):
        assert page.get_by_label(label, exact=True).bounding_box()["y"] < 400
    assert page.locator(".tile").count() <= 6
    for title in ("Loss", "Step time", "Ranks"):
        caption = page.locator("figcaption", has_text=re.compile(f"^{title}"))
        box = page.locator("figure", has=caption).bounding_box()
        assert box["y"] + box["height"] <= 800, title
    page.close()


def test_a_curve_shows_values_by_pointer_and_by_key(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.goto(page_file.as_uri())
    area = page.locator(".area").first
    words = page.locator("figure output").first
    box = area.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    # Step 150 of 300: the loss is 5 - 150 / 100.
    expect = r"loss 3\.\d+, smoothed 3\.\d+ at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(expect, words.inner_text())
    places = page.evaluate("plots.map(({u}) => Math.round(u.cursor.left))")
    assert max(places) - min(places) < 30, "the cursor is at the same time in all curves"
    area.focus()
    before = words.inner_text()
    page.keyboard.press("ArrowRight")
    assert words.inner_text() != before
    page.close()


def test_dragging_zooms_all_curves_and_a_double_click_shows_all_again(
    browser: Any, page_file: Path
) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.goto(page_file.as_uri())
    views = "plots.map(({u}) => [u.scales.x.min, u.scales.x.max])"
    whole = page.evaluate(views)
    over = page.locator(".u-over").first
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=4)
    page.mouse.up()
    zoomed = page.evaluate(views)
    assert all(view == pytest.approx(zoomed[0]) for view in zoomed)
    length = whole[0][1] - whole[0][0]
    assert zoomed[0][1] - zoomed[0][0] == pytest.approx(length / 4, rel=0.05)
    over.dblclick(position={"x": 50, "y": 50})
    assert page.evaluate(views) == whole
    page.locator(".area").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    assert page.evaluate(views) != whole, "the keyboard zooms too"
    page.close()


def test_on_paper_everything_is_open_and_nothing_is_cut_off(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": 794, "height": 1123})
    page.goto(page_file.as_uri())
    assert page.locator("details:not([open])").count() > 0
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert not page.locator(".hint").is_visible()
    wide = (
        "[...document.querySelectorAll('.scroll, body')].map((e) => e.scrollWidth - e.clientWidth)"
    )
    assert max(page.evaluate(wide)) <= 0
    page.close()


def test_text_from_the_log_runs_no_script_in_the_file(browser: Any, page_file: Path) -> None:
    """The file shows such text as text; even if it did not, its policy would forbid the script."""
    careless = page_file.with_name("careless.html")
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    text, count = policy.subn("", page_file.read_text())
    assert count == 1
    careless.write_text(text)
    broken = []
    for file in (page_file, careless):
        page = browser.new_page()
        page.goto(file.as_uri())
        page.evaluate("document.body.innerHTML = '<img src=data: onerror=window.broken=1>'")
        page.wait_for_timeout(500)
        broken.append(page.evaluate("window.broken"))
        page.close()
    assert broken == [None, 1], "the attack works without the policy"
