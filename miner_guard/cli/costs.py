"""`miner-guard costs`: what monitoring costs; `costs estimate`: what a new operation would cost;
`costs known`: what source 000 advises about common operations."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Optional

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

if TYPE_CHECKING:
    from miner_guard.costs import KnownOperation


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
        typer.Option(
            "--every", min=1, callback=a_number, help="estimate: number of steps between calls."
        ),
    ] = None,
    seconds: Annotated[
        Optional[float],
        typer.Option(
            "--seconds", min=0, callback=a_number, help="estimate: how long one call takes."
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, callback=a_number, help="estimate: number of training steps."
        ),
    ] = 1000,
    step_time: Annotated[
        Optional[float],
        typer.Option(
            "--step-time",
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
    place = open_context(config, name, state_dir)
    if what == "":
        _ledger(place, as_json=as_json)
    elif what == "presets":
        from miner_guard.costs import PRESETS

        echo(json.dumps(PRESETS, indent=1))
    elif what == "known":
        echo(json.dumps(_known_document(), indent=1) if as_json else _known_words())
    elif what == "estimate":
        if every is None or seconds is None:
            raise Refused("estimate needs --every STEPS and --seconds SECONDS_PER_CALL", USAGE)
        answer = _estimate(
            place, operation, steps=steps, every=every, seconds=seconds, step_time=step_time
        )
        echo(json.dumps(answer, indent=1) if as_json else _words(answer))
        if answer["budget_status"] != "ok":
            raise typer.Exit(FAILED)
    else:
        raise Refused(f"costs takes `estimate`, `known` or `presets`, not {what!r}", USAGE)


def _ledger(place: CommandContext, *, as_json: bool) -> None:
    from miner_guard.costs import cost_table

    report = statedir.read_json(place.state.costs)
    if not isinstance(report, dict) or "operations" not in report:
        why = (
            "the file can't be read" if place.state.costs.exists() else "no guard has run there yet"
        )
        raise Refused(f"no ledger at {place.state.costs}: {why}", NOT_RUNNING)
    try:
        words = cost_table(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"{place.state.costs} is not a cost ledger: {error!r}; a running guard rewrites it",
            FAILED,
        ) from error
    report = statedir.finite(report)
    echo(json.dumps(report, indent=1, ensure_ascii=False) if as_json else words)
    if report["budget_status"] != "ok":
        raise typer.Exit(FAILED)


def _estimate(
    place: CommandContext,
    operation: str,
    *,
    steps: int,
    every: int,
    seconds: float,
    step_time: float | None,
) -> dict[str, Any]:
    from miner_guard.costs import Budget, estimate, known

    budget = Budget.from_settings(place.settings.config.costs)
    usual = known(operation)
    step_time_s = step_time if step_time is not None else _step_time(place)
    try:
        cost = estimate(steps=steps, every_steps=every, seconds=seconds, step_time_s=step_time_s)
    except ValueError as error:
        raise Refused(str(error), USAGE) from error
    return {
        "operation": operation,
        **asdict(cost),
        "steps": steps,
        "every_steps": every,
        "seconds": seconds,
        "step_time_s": step_time_s,
        "budget_pct": budget.budget_pct,
        "budget_status": budget.status(cost.overhead_pct),
        "fits_every_steps": _fitting(seconds, step_time_s, budget.budget_pct),
        "fits_seconds": budget.budget_pct / 100 * every * step_time_s,
        "cost_per_1000_steps_s": 1000 / every * seconds,
        "advice": None if usual is None else usual.advice,
        "why": None if usual is None else usual.why,
        "tracked": _is_tracked(place, operation),
    }


def _is_tracked(place: CommandContext, operation: str) -> bool:
    """Return True if this state directory's cost ledger contains the operation."""
    report = statedir.read_json(place.state.costs)
    operations = report.get("operations") if isinstance(report, dict) else None
    return isinstance(operations, dict) and operation in operations


def _known_document() -> list[dict[str, Any]]:
    from miner_guard.costs import KNOWN

    names = ("advice", "why", "call_s", "every_steps", "every_s")
    return [
        {"operation": row.name, **{name: getattr(row, name) for name in names}} for row in KNOWN
    ]


def _known_words() -> str:
    """Format source 000's decision framework with its table of typical costs."""
    from miner_guard.costs import KNOWN

    lines: list[str] = []
    for advice, rows in itertools.groupby(KNOWN, lambda row: row.advice):
        lines += [advice, *(f"  {row.name}: {_usual(row)}{row.why}" for row in rows)]
    return "\n".join(lines)


def _usual(row: KnownOperation) -> str:
    """Format the usual cost as `60-300s per call, every 500 steps; `, with only the parts that
    source 000 states."""
    parts = []
    if row.call_s is not None:
        low, high = row.call_s
        parts.append(f"{low:g}-{high:g}s per call" if low else f"under {high:g}s per call")
    if row.every_steps is not None:
        parts.append("every step" if row.every_steps == 1 else f"every {row.every_steps} steps")
    if row.every_s is not None:
        parts.append(f"every {row.every_s:g}s")
    return f"{', '.join(parts)}; " if parts else ""


def _fitting(seconds: float, step_time_s: float, budget_pct: float) -> int:
    """Return the shortest interval, in steps, that keeps this operation within budget."""
    return max(1, -int(-100 * seconds // (budget_pct * step_time_s)))


def _step_time(place: CommandContext) -> float:
    from miner_guard.record.status_document import read_status

    status = read_status(place.state)
    median = None if status is None else status.steps.p50_s
    if median is None or not 0 < median < math.inf:
        raise Refused("the guard has not measured a step time yet; pass --step-time SECONDS", USAGE)
    return median


def _words(answer: dict[str, Any]) -> str:
    verdict = {
        "ok": "within budget",
        "warning": "OVER BUDGET: do not enable it as is",
        "critical": "FAR OVER BUDGET: do not enable it as is",
    }[answer["budget_status"]]
    lines = [
        f"{answer['operation']}: {answer['calls']:g} calls of {answer['seconds']:g}s = "
        f"{answer['cost_s']:.0f}s in {answer['training_s']:.0f}s of training",
        f"overhead {answer['overhead_pct']:.1f}% (budget {answer['budget_pct']:g}%): {verdict}",
    ]
    if answer["budget_status"] != "ok":
        lines.append(
            f"to fit the budget, run it every {answer['fits_every_steps']} steps, with fewer "
            "examples, or after training"
        )
    if answer["advice"] is not None:
        lines.append(f"{answer['advice']}: {answer['why']}")
    return "\n".join([*lines, "", *_checklist(answer)])


def _checklist(answer: dict[str, Any]) -> list[str]:
    """Source 000's checklist for enabling a monitoring feature, filled in for this operation."""
    fits = answer["budget_status"] == "ok"
    within = f"{answer['budget_pct']:g}% of training time"
    cheaper = (
        "not needed"
        if fits
        else f"{answer['fits_seconds']:.1f}s per call would fit, or one call every "
        f"{answer['fits_every_steps']} steps: sample 10-20 examples, not 100"
    )
    tracked = (
        "recorded here"
        if answer["tracked"]
        else f'no calls recorded here: wrap it in tracker.track("{answer["operation"]}")'
    )
    rows = (
        (True, "time per call", f"{answer['seconds']:g}s"),
        (True, "how often", f"every {answer['every_steps']} steps"),
        (True, "cost per 1000 steps", f"{answer['cost_per_1000_steps_s']:.0f}s"),
        (True, "share of training time", f"{answer['overhead_pct']:.1f}%"),
        (fits, f"below {within}", "yes" if fits else "no"),
        (fits, "cheaper", cheaper),
        (fits, "alternative", "not needed" if fits else "run it on a checkpoint, after training"),
        (answer["tracked"], "in the cost ledger", tracked),
    )
    return [
        "checklist",
        *(f"[{'x' if done else ' '}] {question}: {note}" for done, question, note in rows),
    ]
