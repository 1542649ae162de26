"""The tiles name their limits and show when they are out of date; the strip explains itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miner_guard.show.report import render
from miner_guard.system.clock import iso_utc
from miner_guard.watch.state_words import StateWeek
from tests.support.guard_log import Log
from tests.support.present_state import write_status

_STEPS = {
    "steps": 900,
    "last_step_age_s": 3.0,
    "max_s": 16.0,
    "p50_s": 15.0,
    "p95_s": 16.0,
    "grade": "good",
    "goodput": {"training": 0.9, "hang": 0.08, "init": 0.02},
}


def _tiles(tmp_path: Path, *, age_s: float = 0.0, **status: Any) -> dict[str, tuple[str, str, str]]:
    """By name: the tile's class, its value and its note."""
    log = Log(tmp_path)
    log.step(1)
    document = {"state": "running", "steps": _STEPS, "updated": iso_utc(log.clock.wall())}
    write_status(log.state.root, {**document, **status}, age_s=age_s)
    tile = re.compile(
        r'<div class="(tile[^"]*)"><b class="([^"]*)">([^<]*)</b><span>([^<]*)</span>'
        r"(?:<small>([^<]*)</small>)?"
    )
    page = render(log.state)
    return {m[4]: (m[1], m[3], m[5] or "") for m in tile.finditer(page)}


def test_each_figure_with_a_limit_names_it(tmp_path: Path) -> None:
    repo = {"age_s": 1850.0, "limit_s": 2000.0, "due": True, "stale": False}
    tiles = _tiles(tmp_path, uploads={"repo": repo})
    assert tiles["repo age"] == ("tile", "1,850 s", "limit 2,000 s")
    assert tiles["step p50 / p95"][2] == "grade: good"
    assert tiles["goodput"][1:] == ("90%", "hang 8%")
    assert tiles["steps"][2] == "last one 3 s ago"


def test_all_figures_of_a_guard_that_is_gone_are_stale(tmp_path: Path) -> None:
    """The first screen must not show healthy figures below GUARD GONE."""
    assert {kind for kind, *_ in _tiles(tmp_path, age_s=900).values()} == {"tile old"}


@pytest.mark.parametrize(
    "changes",
    [{"state": "waiting"}, {"steps": {**_STEPS, "last_step_age_s": 366.0}}],
    ids=["restarting", "hanging"],
)
def test_the_last_steps_figures_are_stale_while_no_rank_steps(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A loss and a step time from before the hang must not look current."""
    tiles = _tiles(tmp_path, **changes)
    stale = {name for name, (kind, *_) in tiles.items() if kind == "tile old"}
    assert stale == {"steps", "loss", "step p50 / p95"}


def test_no_tile_hides_a_failure(tmp_path: Path) -> None:
    health = {
        "gpus": {"gpus": [{"state": "ok"}, {"state": "lost"}], "state": "ok"},
        "host": {"disk_free_bytes": 0, "disk_free_by_folder_bytes": {"work": 9e12, "state": 0}},
    }
    tiles = _tiles(tmp_path, health=health, verdict={"key": "disk"})
    assert tiles["GPUs ok"][1] == "1 of 2"
    assert tiles["disk free"][1:] == ("0.0 GB", "disk of state")


def test_a_block_below_the_minimum_inner_step_does_not_count_as_a_problem(tmp_path: Path) -> None:
    """The page of a healthy miner must not read "uploads blocked 34"."""
    log = Log(tmp_path)
    for inner in (10, 20, 30, 60):
        log.say(
            "upload_blocked",
            reason="why",
            outer_step=1,
            inner_step=inner,
            kind="gradient",
            verdicts=[],
        )
    page = render(log.state)
    tile = '<b class="warn">1</b><span>uploads blocked</span><small>and 3 before inner step 50'
    assert tile in page
    assert page.count("UPLOAD BLOCKED: why, gradient</td>") == 5, "four uploads and audits"


@pytest.mark.parametrize(
    ("hours", "labels"),
    [
        (3, []),
        (30, []),
        (60, ["Jan 2", "Jan 3", "Jan 4"]),
        (200, ["Jan 3", "Jan 5", "Jan 6", "Jan 7", "Jan 8", "Jan 9"]),
    ],
)
def test_the_strip_has_dates_a_legend_and_its_rule(
    tmp_path: Path, hours: float, labels: list[str]
) -> None:
    """The page must not say "last 7 days" above a three-hour log."""
    log = Log(tmp_path)
    now = log.clock.wall() + 3600 * hours
    week = StateWeek({})
    week.add("green", log.clock.wall(), now)
    verdict = {
        "life": "training",
        "colour": "green",
        "week": week.to_json(),
        "week_start": week.start,
    }
    write_status(log.state.root, {"verdict": verdict, "updated": iso_utc(now)})
    page = render(log.state)
    axis = page.partition('<div class="axis"')[2].partition("</div>")[0]
    assert re.findall(r">([A-Z][a-z]{2} \d+)<", axis) == labels
    for words in ("failing", "no guard"):
        assert words in page
    assert "Each cell covers 2 h and shows the worst state that held for 6 min or longer" in page
    shown = "7 days" if hours > 168 else f"{hours / 24:g} days" if hours >= 48 else f"{hours} h"
    assert f"<small>last {shown}: well 100%" in page
