"""The report's tiles: the run's figures, each with its limit or its age."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

from miner_guard.config import GateSettings
from miner_guard.record.words import percentages
from miner_guard.reporting.report_data import Data
from miner_guard.reporting.report_tables import is_early, number, when
from miner_guard.watch.state import is_silent, now_of, span

_OVERDUE_S = 60.0
_OVERDUE_FACTOR = 4.0
"""The last step's figures are out of date if the step is older than both `_OVERDUE_S` seconds and
this multiple of the longest step."""

_GIB = 1024**3


@dataclass(frozen=True)
class Tile:
    """One figure. `kind` is the CSS class of its colour: `bad`, `warn` or empty."""

    name: str
    value: str | None
    """None if unknown."""

    kind: str = ""
    note: str = ""
    """The limit, the age, or an explanation."""

    stale: bool = False
    """True if the figure is out of date."""


def tiles(data: Data, gate: GateSettings) -> str:
    """All tiles; those of a silent guard are stale."""
    shown = [*_steps(data), *_life(data), *_uploads(data, gate), *_machine(data)]
    silent = is_silent(data.status, data.status_age_s)
    if silent:
        shown = [replace(tile, stale=True) for tile in shown]
    updated = (data.status.updated or "")[:19].replace("T", " ")
    words = f"<p class='none'>As of {updated} UTC, when the guard last wrote:</p>" if silent else ""
    cells = "".join(_drawn(tile) for tile in shown)
    return f'<section aria-label="Figures">{words}<div class="tiles">{cells}</div></section>'


def _drawn(tile: Tile) -> str:
    note = f"<small>{escape(tile.note)}</small>" if tile.note else ""
    return (
        f'<div class="tile{" old" if tile.stale else ""}">'
        f'<b class="{tile.kind}">{escape(tile.value or "unknown")}</b>'
        f"<span>{escape(tile.name)}</span>{note}</div>"
    )


def _steps(data: Data) -> Iterator[Tile]:
    steps = data.status.steps
    # A non-finite loss appears as a word in the status, and not in the curve.
    word = steps.loss if isinstance(steps.loss, str) else None
    age = steps.last_step_age_s
    overdue = age is not None and age > max(_OVERDUE_S, _OVERDUE_FACTOR * (steps.max_s or 0.0))
    stale = overdue or data.status.state != "running"
    ago = "" if age is None else f"last one {span(age)} ago"
    yield Tile("steps", number(steps.steps, ",.0f"), "", ago, stale)
    note = "not a number" if word else "first → last shown"
    yield Tile("loss", _loss(data, word), "bad" if word else "", note, stale)
    grade = f"grade: {steps.grade}" if steps.grade else ""
    poor = "warn" if steps.grade == "bad" else ""
    yield Tile("step p50 / p95", _pair(steps.p50_s, steps.p95_s), poor, grade, stale)
    slow = data.counts["slow_step"]
    yield Tile("slow steps", str(slow), "warn" if slow else "", _last(data, "slow_step"))


def _life(data: Data) -> Iterator[Tile]:
    goodput = percentages(data.status.steps.goodput)
    lost = {name: data.status.steps.goodput[name] for name in goodput if name != "training"}
    most = max(lost, key=lambda name: lost[name], default=None)
    note = "" if most is None else f"{most.replace('_', ' ')} {goodput[most]}"
    yield Tile("goodput", goodput.get("training"), "", note)
    for name, event in (("hangs", "hang_detected"), ("restarts", "miner_restarting")):
        count = data.counts[event]
        yield Tile(name, str(count), "warn" if count else "", _last(data, event))


def _uploads(data: Data, gate: GateSettings) -> Iterator[Tile]:
    repo = data.status.uploads.repo
    limit = gate.repo_age_limit_s if repo.limit_s is None else repo.limit_s
    kind = "bad" if repo.stale else "warn" if repo.due else ""
    yield Tile("repo age", number(repo.age_s, ",.0f", " s"), kind, f"limit {limit:,.0f} s")
    verified, failed = data.counts["upload_succeeded"], data.counts["upload_failed"]
    last = _last(data, "upload_succeeded")
    note = f"{failed} failed" + (f", {last}" if last else "")
    yield Tile("uploads verified", str(verified), "bad" if failed else "", note)
    least = gate.min_inner_step
    early = sum(is_early(mark, gate) for mark in data.of("upload_blocked"))
    blocked = data.counts["upload_blocked"] - early
    # A block below the minimum inner step is normal in every outer step.
    note = f"and {early} before inner step {least}" if early else ""
    yield Tile("uploads blocked", str(blocked), "warn" if blocked else "", note)


def _machine(data: Data) -> Iterator[Tile]:
    health, verdict = data.status.health, data.status.verdict
    key = None if verdict is None else verdict.key
    gpus = health.gpus.gpus
    well = sum(row.get("state") == "ok" for row in gpus)
    if gpus:
        yield Tile("GPUs ok", f"{well} of {len(gpus)}", "" if well == len(gpus) else "bad")
    elif health.gpus.state in ("absent", "ok"):
        yield Tile("GPUs", "none", "bad" if key == "cpu_fallback" else "", "NVML reports none")
    else:
        yield Tile("GPUs", None)
    folders = health.host.get("disk_free_by_folder_bytes") or {}
    free = health.host.get("disk_free_bytes")
    fullest = min(folders, key=lambda name: folders[name], default="")
    size = (
        None if free is None else number(free / _GIB, ",.0f" if free > 10 * _GIB else ".1f", " GB")
    )
    yield Tile("disk free", size, "bad" if key == "disk" else "", fullest and f"disk of {fullest}")
    costs = data.costs or {}
    over = costs.get("budget_status", "ok") != "ok"
    budget = number(costs.get("budget_percentage"), "g", " %")
    yield Tile(
        "monitoring",
        number(costs.get("total_percentage"), ".2f", " %"),
        "bad" if over else "",
        f"budget {budget}" if budget else "",
    )
    incentive = data.status.chain.incentive
    note = "" if incentive is not None else data.status.chain.reason or "no chain is configured"
    yield Tile("incentive", number(incentive, ".4f"), "", note[:40])


def _last(data: Data, event: str) -> str:
    """The time of the newest of these events; empty if there is none."""
    marks = data.of(event)
    if not marks:
        return ""
    now = now_of(data.status, data.status_age_s)
    today = now is not None and when(now)[:10] == when(marks[-1].time)[:10]
    return f"last {when(marks[-1].time)[11 if today else 5 : 16]} UTC"


def _loss(data: Data, word: str | None) -> str | None:
    """The first and last loss in the window."""
    if data.first is None or data.last is None or not data.loss:
        return word
    start = data.loss.at(data.first)
    if start is None:
        start = data.loss.first[1] if data.loss.first else None
    end = word or number(data.loss.at(data.last), ".2f")
    return f"{number(start, '.2f')} → {end}"


def _pair(one: float | None, other: float | None) -> str | None:
    a, b = (number(value, ".0f" if (value or 0) >= 10 else ".2g") for value in (one, other))
    return None if a is None or b is None else f"{a} / {b} s"
