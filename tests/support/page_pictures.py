"""Takes pictures of the page in each of its states, on a desktop, on a phone, in dark mode and on
paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miner_guard.show.page import render
from tests.support.page_states import STATES
from tests.support.present_state import status_of, write_status

_GONE_S = 900.0
TITLES = {
    "healthy": "Healthy",
    "hang": "Forty seconds after a hang",
    "nan": "The loss is NaN",
    "blocked": "The gate blocks an upload that is due",
    "disk-full": "The disk is full",
    "guard-gone": "The guard is gone",
    "no-gpu": "No GPU",
    "ranks-16": "Sixteen ranks, one of them slow",
    "crash-loop": "A crash loop",
    "week": "A week",
}
LOOKS = {"phone": "A phone", "dark": "Dark", "print": "On paper"}


def page_of(name: str, folder: Path) -> Path:
    """One state's report as a file."""
    root = folder / name
    root.mkdir()
    state = STATES[name](root).write()
    if name == "guard-gone":
        write_status(state.root, status_of(state.root), age_s=_GONE_S)
    page = folder / f"{name}.html"
    page.write_text(render(state), encoding="utf-8")
    return page


def take(browser: Any, folder: Path, images: Path) -> None:
    """Take the first screen of each state, the hang's on a phone too, and all of the week in dark
    mode and on paper."""
    pages = {name: page_of(name, folder) for name in TITLES}
    for name, page in pages.items():
        _shot(browser, page, images / f"state-{name}.png", size=(1000, 640))
    hang = pages["hang"]
    _shot(browser, hang, images / "state-phone.png", size=(390, 760))
    _shot(browser, pages["week"], images / "state-dark.png", size=(1000, 2600), color_scheme="dark")
    _shot(browser, pages["week"], images / "state-print.png", size=(794, 2600), media="print")


def _shot(browser: Any, page: Path, image: Path, *, size: tuple[int, int], **look: str) -> None:
    """`look`: `color_scheme` or `media`, to be emulated by playwright."""
    shown = browser.new_page(viewport={"width": size[0], "height": size[1]})
    shown.emulate_media(**look)
    shown.goto(page.as_uri())
    shown.screenshot(path=image)
    shown.close()


def markdown() -> Iterator[str]:
    """The pictures' section of docs/screens.md."""
    for name, title in {**TITLES, **LOOKS}.items():
        yield f"### {title}\n\n![{title}](images/state-{name}.png)\n"
