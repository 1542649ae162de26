"""The milestones from source 004's timeline: which of them the run has reached and when, and which
only validators know."""

from __future__ import annotations

from dataclasses import dataclass

from miner_guard.config import GateSettings
from miner_guard.reporting.report_data import Data, Mark

_UNREADABLE = "only validators know"
_STEP_S = 30.0
_MEMORY_GB = 10.0
_STILL_S = 3600.0


@dataclass(frozen=True)
class Milestone:
    """One line of the timeline. `reached`: when, in seconds since 1970; if None, `reason` says
    why."""

    stage: str
    title: str
    reached: float | None
    state: str
    """`yes`, `no` or `unknown`."""

    reason: str


def milestones(data: Data, gate: GateSettings) -> list[Milestone]:
    """All milestones, in the order of source 004."""
    return [*_diagnosis(data), *_first_upload(data, gate), *_regular(data, gate), *_validators()]


def _at(stage: str, title: str, time: float | None, otherwise: str) -> Milestone:
    return Milestone(
        stage, title, time, "no" if time is None else "yes", "" if time is not None else otherwise
    )


def _diagnosis(data: Data) -> list[Milestone]:
    stage = "Hour 0-1: diagnosis"
    reports = data.of("gpu_diagnostics")
    ranks = reports[-1].fields.get("ranks") or [] if reports else []
    when = reports[-1].time if reports else None
    cuda = bool(ranks) and all(rank.get("cuda_available") for rank in ranks)
    on_gpu = bool(ranks) and all(str(rank.get("model_device")).startswith("cuda") for rank in ranks)
    no_report = (
        "no GPU diagnostics in the log" if not reports else "the GPU diagnostics show otherwise"
    )
    memory = data.step_memory or data.gpu_memory
    return [
        _at(stage, "GPU diagnostics show CUDA available", when if cuda else None, no_report),
        _at(stage, "Model on GPU", when if on_gpu else None, no_report),
        _at(
            stage,
            "Step time < 30 seconds",
            data.step_time.first_time(lambda v: v < _STEP_S),
            "no such step yet",
        ),
        _at(stage, "GPU memory > 10 GB", memory.first_time(lambda v: v > _MEMORY_GB), "not seen"),
    ]


def _first_upload(data: Data, gate: GateSettings) -> list[Milestone]:
    stage = "Hour 1-2: first valid upload"
    required = gate.min_inner_step
    done, allowed = data.of("upload_succeeded"), data.of("upload_allowed")
    fresh = data.repo_age.first_time(lambda v: v < gate.repo_age_limit_s)
    return [
        _at(
            stage,
            f"Inner step reaches {required}+",
            data.inner_step.first_time(lambda v: v >= required),
            "not yet",
        ),
        _at(stage, "Upload validation passes", _time(allowed or done), "no upload allowed yet"),
        _at(stage, "First gradient uploaded and verified", _time(done), "no upload verified yet"),
        _at(
            stage,
            f"Repo age < {gate.repo_age_limit_s:.0f} seconds",
            fresh,
            "never below the limit so far",
        ),
    ]


def _time(marks: list[Mark]) -> float | None:
    return marks[0].time if marks else None


def _regular(data: Data, gate: GateSettings) -> list[Milestone]:
    stage = "Hour 2-6: regular uploads"
    done = data.of("upload_succeeded")
    losses = [loss for _, loss in data.loss.window(data.first or 0.0, data.last or 0.0)]
    tenth = max(1, len(losses) // 10)
    falls = len(losses) >= 20 and sum(losses[-tenth:]) / tenth < sum(losses[:tenth]) / tenth
    blocked = [
        mark
        for mark in data.of("upload_blocked")
        if (mark.fields.get("inner_step") or 0) >= gate.min_inner_step
    ]
    slow = [mark for mark in data.of("slow_step") if mark.level != "debug"]
    end = data.last
    got_there = data.inner_step.first_time(lambda v: v >= gate.min_inner_step) is not None
    return [
        _at(
            stage,
            "Uploads regularly",
            done[2].time if len(done) > 2 else None,
            f"{len(done)} verified so far",
        ),
        _at(
            stage,
            "Loss decreasing over time",
            end if falls else None,
            "the loss is not decreasing, or there are too few steps",
        ),
        _quiet(data, stage, 'No "SLOW STEP" warnings for an hour', slow),
        _at(
            stage,
            f'No "UPLOAD BLOCKED" from inner step {gate.min_inner_step} on',
            end if got_there and not blocked else None,
            f"{len(blocked)} blocked" if blocked else "inner step not reached yet",
        ),
    ]


def _quiet(data: Data, stage: str, title: str, marks: list[Mark]) -> Milestone:
    """A milestone reached after an hour without any of `marks`."""
    if data.first is None or data.last is None:
        return _at(stage, title, None, "no data")
    since = (marks[-1].time if marks else data.first) + _STILL_S
    return _at(
        stage,
        title,
        since if since <= data.last else None,
        f"{len(marks)} so far; no quiet hour yet",
    )


def _validators() -> list[Milestone]:
    rows = {
        "Hour 6-12: first validations": (
            "Validators download the gradients",
            "First score updates",
            "Train Random > 10",
            "Rank improves",
        ),
        "Day 1-2: score improvement": (
            "Train Random 20-40",
            "Train Assigned > 0.3",
            "Rank < 15",
            "Consistent validations",
        ),
        "Week 1: competitive": (
            "Train Random 40-60",
            "Train Assigned > 0.5",
            "Rank < 10",
            "AllReduce participation > 80%",
        ),
    }
    return [
        Milestone(stage, title, None, "unknown", _UNREADABLE)
        for stage, titles in rows.items()
        for title in titles
    ]
