"""Starts published training scripts under a real guard, and writes a table of what the guard saw.

    python -m tests.trainers.published ../nanoGPT ../examples …   # folders of checkouts
    python -m tests.trainers.published ../nanoGPT --faults

A checkout is recognised by the last part of its repository's name, or given as `NAME=FOLDER`
(`pytorch/examples=/tmp/examples`). Its files stay as they are: each run starts in a copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.requires import REPO
from tests.trainers.recipes import PUBLISHED, Recipe

_INJECT = REPO / "tests" / "faults" / "miners" / "inject.py"
_LIMIT_S = 300
_GUARD_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z \| ")
_EMOJI = 4
_CLOSE = 0.01
"""A loss that differs from the trainer's by no more than this share counts as equal."""

FAULTS = {
    "raises": ("incident", "code_bug", "code_bug"),
    "hangs": ("hang_detected", "at inject.py:", "hang"),
}
"""By fault: the event that must name it, words from its line, and `explain`'s root cause."""


@dataclass(frozen=True)
class Ended:
    """One run of a trainer."""

    code: int
    printed: str
    events: list[dict[str, Any]]
    state: Path

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


class Trial:
    """One trainer in a separate directory."""

    def __init__(self, recipe: Recipe, checkout: Path, folder: Path) -> None:
        self.recipe = recipe
        self._checkout = checkout
        self._folder = folder

    def run(self, name: str, *, guarded: bool, fault: str | None = None) -> Ended:
        """Run the script in a fresh copy of its checkout, with or without a guard."""
        recipe, work = self.recipe, self._folder / name
        shutil.copytree(self._checkout, work, ignore=shutil.ignore_patterns(".git"))
        recipe.prepare(work)
        state = self._folder / f"{name}-state"
        command = [sys.executable, *([] if fault is None else [str(_INJECT), fault])]
        command += [str(work / recipe.script), *recipe.arguments.split()]
        settings = {
            "GPU__PREFLIGHT": "false",
            "LOGS__STEP_LINES_PER_S": "100000",
            "MINER__STOP_TIMEOUT_S": "3",
            "HANG__ACTION": "stop",
            "HANG__MIN_S": "8" if fault == "hangs" else "120",
        }
        paths = [str(work / part) for part in recipe.path]
        env = {
            **os.environ,
            **{f"MINER_GUARD_{key}": value for key, value in settings.items()},
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([*paths, str(REPO), os.environ.get("PYTHONPATH", "")]),
        }
        if guarded:
            guard = [sys.executable, "-m", "miner_guard", "run", "--attach", "auto", "--no-restart"]
            command = [*guard, "--state-dir", str(state), "--", *command]
        ended = subprocess.run(
            command,
            cwd=work / recipe.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
        output = (ended.stdout + b"\n" + ended.stderr).decode("utf-8", "replace")
        (self._folder / f"{name}.log").write_text(output, encoding="utf-8")
        log = state / "guard.jsonl"
        events = [json.loads(line) for line in log.open()] if log.exists() else []
        printed = _of_the_trainer(ended.stdout.decode("utf-8", "replace"), events).replace(
            str(work), ""
        )
        return Ended(ended.returncode, printed, events, state)

    def row(self) -> dict[str, str]:
        """The guard's view of a healthy run, and the trainer's output without the guard."""
        recipe = self.recipe
        alone = self.run("alone", guarded=False)
        if alone.code != 0:
            return {"attached": f"does not run here: exit code {alone.code}"}
        seen = self.run("attached", guarded=True)
        steps = [e for e in seen.named("inner_step") if e["rank"] == 0]
        printed = recipe.losses(alone.printed)
        explained, told_alone = (
            recipe.without_times(ended.printed).rstrip() for ended in (seen, alone)
        )
        return {
            "attached": "yes" if steps else "no",
            "steps": f"{len(steps)} of {recipe.steps}",
            "loss": _losses(recipe, printed, [e["loss"] for e in steps]),
            "output": _output(recipe, explained == told_alone),
            "end": _end(seen),
        }

    def fault(self, fault: str) -> str:
        """`named`, or the guard's report if it named something else."""
        event, words, label = FAULTS[fault]
        seen = self.run(fault, guarded=True, fault=fault)
        wrong = [e["msg"][:60] for e in seen.named(event) if words not in e["msg"]]
        right = [e for e in seen.named(event) if words in e["msg"]]
        if not right:
            return f"not named: {wrong or [e['event'] for e in seen.events[-4:]]}"
        expected = None if event == "incident" else 0
        if right[0]["rank"] != expected:
            return f"rank {right[0]['rank']}, not {expected}"
        explain = [sys.executable, "-m", "miner_guard", "explain", "--state-dir", str(seen.state)]
        explained = subprocess.run(explain, capture_output=True, text=True, check=False).stdout
        return (
            "named"
            if explained.startswith(f"ROOT CAUSE {label} ")
            else f"explain: {explained[:60]!r}"
        )


def _not_injected(recipe: Recipe) -> str:
    if recipe.spawns:
        return "not injected: it starts its ranks by spawn"
    return "" if recipe.steps >= 3 else "not injected: it ends before step 3"


def _of_the_trainer(printed: str, events: Sequence[dict[str, Any]]) -> str:
    """The trainer's output without the guard's lines, including every line of the guard's
    blocks."""
    own = tuple({line for event in events for line in event["msg"].splitlines() if line.strip()})
    lines = printed.splitlines()
    return "\n".join(line for line in lines if not _GUARD_LINE.match(line) and not _is(line, own))


def _is(line: str, own: Sequence[str]) -> bool:
    """Whether the line is one of these; an emoji precedes the first line of a block."""
    return any(line.endswith(each) and len(line) - len(each) <= _EMOJI for each in own)


def _losses(recipe: Recipe, printed: Sequence[float], seen: Sequence[Any]) -> str:
    if not recipe.every:
        return "prints none"
    pairs = [
        (loss, seen[place])
        for number, loss in enumerate(printed)
        if recipe.skipped <= (place := recipe.first + number * recipe.every) < len(seen)
    ]
    if not pairs:
        return "nothing to compare"
    off = [
        abs(a - b) / max(abs(a), 1e-3) if isinstance(b, float) else float("inf") for a, b in pairs
    ]
    return f"{len(pairs)} equal" if max(off) <= _CLOSE else f"off by {max(off):.1%}"


def _output(recipe: Recipe, same: bool) -> str:
    if not recipe.seeded:
        return "not compared: it sets no seed"
    return "same" if same else "differs"


def _end(seen: Ended) -> str:
    if seen.named("miner_finished"):
        return "finished"
    exits = [e["msg"] for e in seen.named("miner_exited")]
    return exits[-1][:60] if exits else f"code {seen.code}"


def _checkouts(named: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for given in named:
        name, _, folder = given.rpartition("=")
        path = Path(folder).resolve()
        known = [r for r in PUBLISHED if r == name or (not name and r.endswith(f"/{path.name}"))]
        if not known:
            raise SystemExit(
                f"{given}: not a checkout of {', '.join(PUBLISHED)}; write NAME=FOLDER"
            )
        yield known[0], path


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("checkout", nargs="+", help="FOLDER or OWNER/NAME=FOLDER")
    options.add_argument("--only", default="", help="trainers whose name contains this")
    options.add_argument("--faults", action="store_true", help="inject faults instead")
    options.add_argument("--keep", help="a folder for logs and state directories")
    given = options.parse_args()
    trainers = [
        (recipe, path) for name, path in _checkouts(given.checkout) for recipe in PUBLISHED[name]
    ]
    folder = Path(given.keep or tempfile.mkdtemp(prefix="trainers-")).resolve()
    for recipe, path in trainers:
        if given.only not in recipe.name:
            continue
        if missing := [m for m in recipe.modules if importlib.util.find_spec(m) is None]:
            print(f"| {recipe.name} | not run: {', '.join(missing)} is not installed |", flush=True)
            continue
        print(_answers(recipe, path, folder, given), flush=True)


def _answers(recipe: Recipe, path: Path, folder: Path, given: argparse.Namespace) -> str:
    """One trainer's row."""
    trial = Trial(recipe, path, folder / recipe.name.replace(" ", "-").replace("'", ""))
    try:
        if given.faults:
            why = _not_injected(recipe)
            cells = [why] if why else [trial.fault(fault) for fault in FAULTS]
        else:
            cells = list(trial.row().values())
    except subprocess.TimeoutExpired:
        cells = [f"not run: over {_LIMIT_S} s on this machine"]
    return "| " + " | ".join([recipe.name, *cells]) + " |"


if __name__ == "__main__":
    main()
