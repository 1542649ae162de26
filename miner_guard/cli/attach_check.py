"""`miner-guard attach-check FILE`: shows which steps `--attach log` would read from a log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Optional

import typer

from miner_guard.cli.echo import echo
from miner_guard.cli.files import open_text
from miner_guard.cli.options import DEFAULT_NAME, Config, Json, open_context
from miner_guard.cli.working import Working
from miner_guard.exits import CONFIG, FAILED, USAGE, Refused
from miner_guard.record.words import counted
from miner_guard.watch.lines import LogCheck, StepSeen, check, patterns

_FIRST, _LAST = 8, 3
"""How many steps to print in full from the beginning and from the end of a log."""

_UNITS = {"seconds": ("step time", "{:.3f}s"), "gpu_gb": ("memory", "{:.2f}GB")}


def command(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The miner's log; - is stdin.")],
    profile: Annotated[
        Optional[str], typer.Option("--profile", help="Also use this profile's patterns.")
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show which steps `--attach log` would read from a log. Exit 1: none."""
    place = open_context(config, DEFAULT_NAME, None)
    named = profile or place.profile
    try:
        known = patterns(named, place.settings.config.miner.log_patterns)
    except (OSError, ValueError) as error:
        raise Refused(f"--profile {named}: {error}", USAGE) from error
    except re.error as error:
        words = (
            f"[miner] log_patterns: {error.pattern!r} is not a valid regular expression: {error}"
        )
        raise Refused(words, CONFIG) from error
    with open_text(file, "a log", "\n") as lines, Working("reading the log"):
        result = check(lines, known)
    if as_json:
        echo(json.dumps(result.as_dict(), ensure_ascii=False))
    else:
        for line in report(result, named):
            echo(line)
    if not result.steps:
        raise typer.Exit(FAILED)


def report(result: LogCheck, profile: str | None) -> Iterator[str]:
    """Yield the lines that show the result on a terminal."""
    steps = result.steps
    shown = steps if len(steps) <= _FIRST + _LAST else [*steps[:_FIRST], *steps[-_LAST:]]
    for at, seen in enumerate(shown):
        if at == _FIRST and len(steps) > len(shown):
            yield f"… {len(steps) - len(shown)} more …"
        yield f"line {seen.place}: {_in_words(seen)}   <- {seen.text}"
    by = f" with {profile}'s patterns" if profile else ""
    yield f"{counted(len(steps), 'step')} in {counted(result.lines, 'line')}{by}" + (
        f": {_fields(result)}" if steps else ""
    )
    if result.pushes or result.failed_pushes:
        yield f"{counted(result.pushes, 'push')}, {result.failed_pushes} failed"
    if result.phases:
        lines = ", ".join(f"{name} {count}" for name, count in sorted(result.phases.items()))
        yield f"phase lines: {lines}"
    if result.misses:
        yield "Not read as steps, closest matches first:"
    for place, miss, text in result.misses:
        yield f"  line {place}: {text!r}: {miss.why}"
    if not steps:
        yield (
            "Add a pattern for the step lines to [miner] log_patterns in guard.toml, for example "
            r"'batch (?P<step>\d+) cost (?P<loss>\S+)', then check again with -c guard.toml"
        )


def _in_words(seen: StepSeen) -> str:
    step = seen.step
    words = [] if step.outer is None else [f"outer {step.outer}"]
    words += [] if step.epoch is None else [f"epoch {step.epoch}"]
    words.append(f"step {step.inner}")
    for name in ("loss", "seconds", "lr", "grad_norm", "gpu_gb"):
        value = getattr(step, name)
        if value is not None:
            called, form = _UNITS.get(name, (name, "{:g}"))
            words.append(f"{called} {form.format(value)}")
    return ", ".join(words)


def _fields(result: LogCheck) -> str:
    total = len(result.steps)
    return ", ".join(
        f"{_UNITS.get(name, (name, ''))[0]} on {'all' if count == total else count or 'none'}"
        for name, count in result.counted().items()
    )
