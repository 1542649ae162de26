"""`miner-guard costs`: what monitoring costs; `costs estimate`: what a new operation would cost;
`costs known` and `presets`: what source 000 advises."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Optional

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli.options import (
    DEFAULT_NAME,
    CommandContext,
    Config,
    Json,
    Name,
    State,
    a_number,
    open_context,
)
from miner_guard.cli.output import echo
from miner_guard.exits import FAILED, NOT_RUNNING, USAGE, Refused

_VERDICTS = {
    "ok": "within budget",
    "warning": "OVER BUDGET: do not enable it as is",
    "critical": "FAR OVER BUDGET: do not enable it as is",
}


def costs(
    what: Annotated[
        str,
        typer.Argument(metavar="estimate|known|presets", help="If omitted, show the costs so far."),
    ] = "",
    operation: Annotated[
        str, typer.Argument(help="estimate: a name for the operation.")
    ] = "this operation",
    every: Annotated[
        Optional[int],
        typer.Option(min=1, callback=a_number, help="estimate: number of steps between calls."),
    ] = None,
    seconds: Annotated[
        Optional[float],
        typer.Option(min=0, callback=a_number, help="estimate: how long one call takes."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, callback=a_number, help="estimate: number of training steps.")
    ] = 1000,
    step_time: Annotated[
        Optional[float],
        typer.Option(
            min=0.001,
            callback=a_number,
            help="estimate: seconds per step; default: the running miner's.",
        ),
    ] = None,
    config: Config = None,
    name: Name = DEFAULT_NAME,
    state_dir: State = None,
    as_json: Json = False,
) -> None:
    """Show what monitoring costs or would cost. Exit 1: over budget."""
    from miner_guard.costs import KNOWN, PRESETS

    if what not in ("", "estimate", "known", "presets"):
        raise Refused(f"costs takes `estimate`, `known` or `presets`, not {what!r}", USAGE)
    place, status = open_context(config, name, state_dir), "ok"
    if what == "presets":
        echo(json.dumps(PRESETS, indent=1))
    elif what == "known" and as_json:
        echo(json.dumps([asdict(row) for row in KNOWN], indent=1))
    elif what == "known":
        for advice, rows in itertools.groupby(KNOWN, lambda row: row.advice):
            echo(advice)
            for row in rows:
                echo(f"  {row.operation}: {row.cost}{'; ' if row.cost else ''}{row.why}")
    elif what == "estimate":
        if every is None or seconds is None:
            raise Refused("estimate needs --every STEPS and --seconds SECONDS_PER_CALL", USAGE)
        asked = {"steps": steps, "every_steps": every, "seconds": seconds}
        answer = _estimate(place, operation, asked, step_time)
        echo(json.dumps(answer, indent=1) if as_json else _words(answer))
        status = answer["budget_status"]
    else:
        report, table = _ledger(place)
        echo(
            json.dumps(statedir.finite(report), indent=1, ensure_ascii=False) if as_json else table
        )
        status = report["budget_status"]
    if status != "ok":
        raise typer.Exit(FAILED)


def _ledger(place: CommandContext) -> tuple[Mapping[str, Any], str]:
    """The guard's monitoring_costs.json and its table. Raises Refused: 3 if there is no such
    file, 1 if it holds something else."""
    from miner_guard.costs import cost_table

    file = place.state.costs
    report = statedir.read_json(file)
    if not isinstance(report, dict) or "operations" not in report:
        why = "the file can't be read" if file.exists() else "no guard has run there yet"
        raise Refused(f"no ledger at {file}: {why}", NOT_RUNNING)
    try:
        return report, cost_table(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"{file} is not a cost ledger: {error!r}; a running guard rewrites it", FAILED
        ) from error


def _estimate(
    place: CommandContext, operation: str, asked: Mapping[str, Any], step_time: float | None
) -> dict[str, Any]:
    """The cost of the operation and whether it fits the budget. Raises Refused (64)."""
    from miner_guard.costs import budget_status, estimate, known

    step_time_s = _step_time(place) if step_time is None else step_time
    try:
        cost = estimate(**asked, step_time_s=step_time_s)
    except ValueError as error:
        raise Refused(str(error), USAGE) from error
    budget, usual = place.settings.config.costs, known(operation)
    share, seconds, every = budget.budget_pct / 100, asked["seconds"], asked["every_steps"]
    ledger = statedir.read_json(place.state.costs)
    recorded = ledger.get("operations") if isinstance(ledger, dict) else None
    return {
        "operation": operation,
        **asdict(cost),
        **asked,
        "step_time_s": step_time_s,
        "budget_pct": budget.budget_pct,
        "budget_status": budget_status(cost.overhead_pct, budget),
        "fits_every_steps": max(1, math.ceil(seconds / (share * step_time_s))) if share else None,
        "fits_seconds": share * every * step_time_s,
        "cost_per_1000_steps_s": 1000 / every * seconds,
        "advice": None if usual is None else usual.advice,
        "why": None if usual is None else usual.why,
        "tracked": isinstance(recorded, dict) and operation in recorded,
    }


def _step_time(place: CommandContext) -> float:
    from miner_guard.record.status_document import read_status

    status = read_status(place.state)
    median = None if status is None else status.steps.p50_s
    if median is None or not 0 < median < math.inf:
        raise Refused("the guard has not measured a step time yet; pass --step-time SECONDS", USAGE)
    return median


def _words(answer: Mapping[str, Any]) -> str:
    """The verdict, and source 000's checklist for enabling a monitoring feature, filled in."""
    fits, name, tracked = answer["budget_status"] == "ok", answer["operation"], answer["tracked"]
    steps, rarer, cheaper = answer["fits_every_steps"], "", "nothing fits a budget of 0%"
    if steps is not None:
        rarer = f"every {steps} steps, with fewer examples, or "
        cheaper = (
            f"{answer['fits_seconds']:.1f}s per call would fit, or one call every {steps} steps: "
            "sample 10-20 examples, not 100"
        )
    untracked = f'no calls recorded here: wrap it in tracker.track("{name}")'
    checklist = (
        (True, "time per call", f"{answer['seconds']:g}s"),
        (True, "how often", f"every {answer['every_steps']} steps"),
        (True, "cost per 1000 steps", f"{answer['cost_per_1000_steps_s']:.0f}s"),
        (True, "share of training time", f"{answer['overhead_pct']:.1f}%"),
        (fits, f"below {answer['budget_pct']:g}% of training time", "yes" if fits else "no"),
        (fits, "cheaper", "not needed" if fits else cheaper),
        (fits, "alternative", "not needed" if fits else "run it on a checkpoint, after training"),
        (tracked, "in the cost ledger", "recorded here" if tracked else untracked),
    )
    lines = [
        f"{name}: {answer['calls']:g} calls of {answer['seconds']:g}s = {answer['cost_s']:.0f}s in "
        f"{answer['training_s']:.0f}s of training",
        f"overhead {answer['overhead_pct']:.1f}% (budget {answer['budget_pct']:g}%): "
        f"{_VERDICTS[answer['budget_status']]}",
    ]
    if not fits:
        lines.append(f"to fit the budget, run it {rarer}after training")
    if answer["advice"] is not None:
        lines.append(f"{answer['advice']}: {answer['why']}")
    lines += ["", "checklist"]
    return "\n".join(
        [*lines, *(f"[{'x' if done else ' '}] {title}: {note}" for done, title, note in checklist)]
    )
