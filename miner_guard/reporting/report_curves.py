"""Builds the report's curves: chooses the lines, marks and bands of each plot."""

from __future__ import annotations

from collections.abc import Sequence

from miner_guard.config import GateSettings
from miner_guard.reporting.report_data import Data
from miner_guard.reporting.report_svg import Bands, Dots, EventLines, Line, Plot, draw
from miner_guard.reporting.time_series import TimeSeries

_MAX_RANKS = 16


def curves(data: Data, gate: GateSettings) -> str:
    """The plots for a run, or for a window within it."""
    if data.first is None or data.last is None:
        return "<h2>Curves</h2><p class='none'>no events in the log yet</p>"
    goodput = Plot("Goodput", "share of time spent training", [Line("goodput", data.goodput)])
    plots = [*_training(data), _repo_age(data, gate), *_gpus(data), goodput]
    head = (
        '<h2>Curves</h2><p class="none hint">All times in UTC. Hover over a curve for its values; '
        "drag to zoom in, double-click to zoom out; arrow keys move, + and − zoom.</p>"
    )
    return head + "".join(draw(plot, data.first, data.last) for plot in plots)


def _training(data: Data) -> list[Plot]:
    ends = [mark.time for mark in data.of("miner_restarting")]
    slow = [
        (mark.time, float(mark.fields.get("step_time_s") or 0.0)) for mark in data.of("slow_step")
    ]
    strange = [
        (mark.time, data.loss.at(mark.time) or 0.0)
        for mark in data.of("loss_spike", "loss_divergence")
    ]
    outages = [Bands("hang", "hang", _hangs(data)), Bands("restart", "restart", _restarts(data))]
    loss = Plot(
        "Loss",
        "",
        [Line("loss", data.loss, "faint"), Line("smoothed", data.loss_smooth)],
        [Dots("bad", "spike or divergence", strange)],
        bands=[*outages, Bands("nan", "NaN", _not_finite(data))],
        zero=False,
        breaks=ends,
    )
    steps = Plot(
        "Step time",
        "s",
        [Line("step time", data.step_time)],
        [Dots("warn", "slow step", slow)],
        bands=outages,
        breaks=ends,
        off_axis=_first_steps(data),
    )
    ranks = sorted(data.rank_work, key=int)[:_MAX_RANKS]
    by_rank = [
        Line(f"rank {rank}", data.rank_work[rank], f"hue{place}")
        for place, rank in enumerate(ranks)
    ]
    if len(by_rank) < 2:
        return [loss, steps]
    return [
        loss,
        steps,
        Plot("Own work by rank", "s per step, without waiting", by_rank, bands=outages),
    ]


def _repo_age(data: Data, gate: GateSettings) -> Plot:
    fates = [
        EventLines("good", "verified", [mark.time for mark in data.of("upload_succeeded")]),
        EventLines("bad", "failed", [mark.time for mark in data.of("upload_failed")]),
    ]
    age = data.repo_age if data.repo_age else _nothing_over(data, fates)
    blocked = Bands("blocked", "blocked by the gate", _blocked(data))
    limit = gate.repo_age_limit_s
    return Plot("Repo age", "s", [Line("repo age", age)], (), fates, [blocked], limit=limit)


def _gpus(data: Data) -> list[Plot]:
    health = data.status.health
    why = health.unknown.get("gpus") or health.gpus.reason
    nothing = f"no data: {why}" if why else "no data"
    memory = data.gpu_memory if data.gpu_memory else data.step_memory
    return [
        Plot("GPU memory", "GB (lowest GPU)", [Line("GPU memory", memory)], nothing=nothing),
        Plot("GPU use", "% (lowest GPU)", [Line("GPU use", data.gpu_use)], nothing=nothing),
    ]


def _until_next_step(data: Data, starts: Sequence[float]) -> list[tuple[float, float]]:
    """Return the spans from each start to the next step, or to the end of the data."""
    spans: list[tuple[float, float]] = []
    for start in starts:
        end = data.step_time.next_after(start) or data.last or start
        if not spans or start > spans[-1][1]:
            spans.append((start, end))
    return spans


def _hangs(data: Data) -> list[tuple[float, float]]:
    """Return the spans from the first silent second of each hang to the miner's exit or the next
    step."""
    exits = [mark.time for mark in data.of("miner_exited", "miner_restarting")]
    spans = []
    for mark in data.of("hang_detected"):
        silent = float(mark.fields.get("idle_s") or 0.0)
        until = data.step_time.next_after(mark.time) or data.last or mark.time
        until = min([until, *(time for time in exits if time >= mark.time)])
        spans.append((mark.time - silent, until))
    return spans


def _restarts(data: Data) -> list[tuple[float, float]]:
    return _until_next_step(
        data, [mark.time for mark in data.of("miner_exited", "miner_restarting")]
    )


def _not_finite(data: Data) -> list[tuple[float, float]]:
    """Return the spans from each NaN or infinite loss to the next finite one."""
    return [
        (mark.time, data.loss.next_after(mark.time) or data.last or mark.time)
        for mark in data.of("loss_nan")
    ]


def _blocked(data: Data) -> list[tuple[float, float]]:
    """Return the spans from each blocked upload to the next one that the gate allows."""
    allowed = [mark.time for mark in data.of("upload_allowed", "upload_succeeded")]
    spans: list[tuple[float, float]] = []
    place = 0
    for mark in data.of("upload_blocked"):
        if spans and mark.time <= spans[-1][1]:
            continue
        while place < len(allowed) and allowed[place] < mark.time:
            place += 1
        end = allowed[place] if place < len(allowed) else data.last or mark.time
        spans.append((mark.time, end))
    return spans


def _first_steps(data: Data) -> list[float]:
    """The time of the first step of each launch."""
    starts = [mark.time for mark in data.of("miner_started")]
    firsts = [time for start in starts if (time := data.step_time.next_after(start)) is not None]
    return firsts if data.step_time.first is None else [*firsts, data.step_time.first[0]]


def _nothing_over(data: Data, fates: Sequence[EventLines]) -> TimeSeries:
    """A flat line to carry the upload marks if there are uploads but the repo's age was never
    read."""
    flat = TimeSeries()
    if data.first is not None and data.last is not None and any(lines.times for lines in fates):
        flat.add(data.first, 0.0)
        flat.add(data.last, 0.0)
    return flat
