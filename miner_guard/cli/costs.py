"""`miner-guard costs`: what monitoring costs; `costs estimate`: what a new operation would cost;
`costs known` and `presets`: what source 000 advises."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import command, options
from miner_guard.cli.output import echo
from miner_guard.exits import FAILED, NOT_RUNNING, USAGE, Refused

_VERDICTS = {
    "ok": "within budget",
    "warning": "OVER BUDGET: do not enable it as is",
    "critical": "FAR OVER BUDGET: do not enable it as is",
}


def _read(table: str) -> Any:
    """Source 000's rows about operations, or its presets."""
    from miner_guard.config import read_toml

    return read_toml(Path(__file__).with_name("known_costs.toml"))[table]


@command(
    "Understand",
    "miner-guard costs",
    "miner-guard costs estimate validation --every 200 --seconds 3 --step-time 3.5",
)
def costs(
    what: Annotated[
        str,
        typer.Argument(metavar="estimate|known|presets", help="If omitted, show the costs so far."),
    ] = "",
    operation: Annotated[
        str, typer.Argument(help="estimate: a name for the operation.")
    ] = "this operation",
    every: Annotated[
        Optional[int], options.at_least(1, "estimate: number of steps between calls.")
    ] = None,
    seconds: Annotated[
        Optional[float], options.at_least(0, "estimate: how long one call takes.")
    ] = None,
    steps: Annotated[int, options.at_least(1, "estimate: number of training steps.")] = 1000,
    step_time: Annotated[
        Optional[float],
        options.at_least(0.001, "estimate: seconds per step; default: the running miner's."),
    ] = None,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
    as_json: options.Json = False,
) -> None:
    """Show what monitoring costs or would cost. Exit 1: over budget."""
    if what not in ("", "estimate", "known", "presets"):
        raise Refused(f"costs takes `estimate`, `known` or `presets`, not {what!r}", USAGE)
    place = options.open_context(config, name, state_dir)
    answer: Any = {}
    if what == "presets":
        answer = _read("preset")
        as_json = True
    elif what == "known":
        answer = _read("operation")
    elif what == "estimate":
        if every is None or seconds is None:
            raise Refused("estimate needs --every STEPS and --seconds SECONDS_PER_CALL", USAGE)
        arguments = {"steps": steps, "every_steps": every, "seconds": seconds}
        answer = _estimate(place, operation, {**arguments, "step_time_s": step_time})
    else:
        answer, table = _ledger(place)
    if as_json:
        echo(json.dumps(statedir.finite(answer), indent=1, ensure_ascii=False))
    else:
        echo(_advice_text(answer) if what == "known" else _words(answer) if what else table)
    if what in ("", "estimate") and answer["budget_status"] != "ok":
        raise typer.Exit(FAILED)


def _advice_text(rows: list[dict[str, Any]]) -> str:
    lines = []
    for advice, group in itertools.groupby(rows, lambda row: str(row["advice"])):
        lines.append(advice)
        lines += (
            f"  {r['operation']}: {'; '.join(filter(None, (r['cost'], r['why'])))}" for r in group
        )
    return "\n".join(lines)


def advice_on(operation: str) -> dict[str, Any] | None:
    """Source 000's row for an operation or an alias of it, written in any style
    (`evolution_snapshot`, `EvolutionSnapshot`); None if it has none."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", operation)
    plain = re.sub(r"[^a-z0-9]+", " ", spaced.lower()).strip()
    rows: list[dict[str, Any]] = _read("operation")
    return next((row for row in rows if plain in (row["operation"], *row["aliases"])), None)


def _ledger(place: options.CommandContext) -> tuple[Mapping[str, Any], str]:
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
    place: options.CommandContext, operation: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Source 000's calculation: calls · seconds / (steps · step time), and whether it fits the
    budget.

    Truncates the number of calls to a tenth, as the document does (2487 steps with a call every 500
    make 4.9 calls).
    """
    from miner_guard.costs import budget_status

    seconds, every = arguments["seconds"], arguments["every_steps"]
    step_time_s = arguments["step_time_s"] or _step_time(place)
    calls = math.floor(10 * arguments["steps"] / every) / 10
    cost_s, training_s = calls * seconds, arguments["steps"] * step_time_s
    budget, usual = place.settings.config.costs, advice_on(operation)
    share, overhead_pct = budget.budget_pct / 100, 100 * cost_s / training_s
    ledger = statedir.read_json(place.state.costs)
    recorded = ledger.get("operations") if isinstance(ledger, dict) else None
    return {
        "operation": operation,
        "calls": calls,
        "cost_s": cost_s,
        "training_s": training_s,
        "overhead_pct": overhead_pct,
        **arguments,
        "step_time_s": step_time_s,
        "budget_pct": budget.budget_pct,
        "budget_status": budget_status(overhead_pct, budget),
        "fits_every_steps": max(1, math.ceil(seconds / (share * step_time_s))) if share else None,
        "fits_seconds": share * every * step_time_s,
        "cost_per_1000_steps_s": 1000 / every * seconds,
        "advice": usual and usual["advice"],
        "why": usual and usual["why"],
        "tracked": isinstance(recorded, dict) and operation in recorded,
    }


def _step_time(place: options.CommandContext) -> float:
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
