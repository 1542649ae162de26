"""Feeds a recording to the watchers of the code at hand, under a clock that only the recording
moves, and returns the facts: every event that the watchers raise, with rank, level, step and line.

`python -m tests.replay.replay [NAME…]` writes the facts of the recordings beside them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miner_guard.config import Config
from miner_guard.costs import set_global_tracker
from miner_guard.guard.app import load_monitors
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.record.events import Event
from miner_guard.record.redaction import Redactor
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.hang import Processes, RankProcesses
from miner_guard.watch.runner import MonitorRunner
from tests.replay.record import OUTSIDE, RUNS
from tests.support.contexts import JobsNever, context

_NOBODY = 2**30
"""A pid that no process can have, for the miner's."""

_AT_ONCE = ("hang evidence", "the incident's card")
"""Jobs whose events are facts; the others only prepare something, or ask the world outside."""

_WHERE = ("step", "inner_step", "outer_step")


class Clock:
    """The recorded time."""

    def __init__(self, monotonic: float, wall: float) -> None:
        self.now, self._ahead = monotonic, wall - monotonic

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self._ahead


class _Jobs(JobsNever):
    def once(self, name: str, work: Callable[[], None]) -> None:
        if name in _AT_ONCE:
            work()


class _Control:
    """Notes what the watchers ask the guard to do."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note

    def restart(self, cause: str) -> None:
        self._note("restart", cause)

    def finish(self, cause: str) -> None:
        self._note("finish", cause)

    def use_command(self, command: Sequence[str]) -> None:
        self._note("use_command", " ".join(command))

    def relaunch(self, cause: str) -> None:
        self._note("relaunch", cause)

    def stop(self, cause: str, exit_code: int) -> None:
        self._note("stop", cause)


class Replay:
    """One recording, played once."""

    def __init__(self, lines: Iterator[list[Any]], start: Mapping[str, Any], folder: Path) -> None:
        self.facts: list[dict[str, Any]] = []
        self._folder = folder
        self._lines, self._input = lines, False
        self._clock = Clock(start["monotonic"], start["wall"])
        self._began = start["monotonic"]
        self._ranks: dict[int, dict[str, Any]] = {}
        self._sections: dict[str, Any] = {}
        self._documents: dict[str, Any] = {}
        self.processes = Processes()
        self._runner = MonitorRunner(self._log)
        around = context(
            folder,
            config=_configured(Config(), start["config"]),
            clock=self._clock,
            emit=self._runner.log,
            jobs=_Jobs(),
            control=_Control(lambda *words: self._fact({"asks": words[0], "line": words[1]})),
            status=lambda: self._documents,
            redactor=Redactor(),
        )
        around.state.flight.mkdir()
        every = load_monitors(around, self._log)
        self._runner.monitors = [monitor for monitor in every if monitor.name not in OUTSIDE]

    def play(self) -> list[dict[str, Any]]:
        for at, kind, *values in self._lines:
            self._clock.now = max(self._clock.now, at)
            getattr(self, f"_{kind}")(*values)
        return self.facts

    def _launch(self, launch: Mapping[str, Any]) -> None:
        self._runner.launch(_made(Launch, {**launch, "pid": _NOBODY}))

    def _steps(self, rank: int, steps: Sequence[Mapping[str, Any]]) -> None:
        self._runner.steps(rank, [_made(StepRecord, step) for step in steps])

    def _entry(self, rank: int, entry: Mapping[str, Any]) -> None:
        self._runner.entry(rank, entry)

    def _out(self, text: str) -> None:
        self._runner.output(text.encode("utf-8", "surrogateescape"))

    def _tick(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self._ranks = {int(r): {**self._ranks.get(int(r), {}), **c} for r, c in changes.items()}
        headers = {rank: _made(Now, header) for rank, header in self._ranks.items()}
        self._documents = {**self._sections, **self._runner.snapshots()}
        self._runner.tick(self._clock.now, headers)

    def _processes(self, states: Mapping[str, Any]) -> None:
        self.processes = _made(Processes, states)

    def _status(self, sections: Mapping[str, Any]) -> None:
        self._sections.update(sections)

    def _event(self, found: Mapping[str, Any]) -> None:
        event = Event.from_json(found)
        assert event is not None, found
        self._input = True
        self._runner.log(event)

    def _exit(self, end: Mapping[str, Any]) -> None:
        if end["code"] == 0 and (objections := self._runner.objections()):
            self._fact({"asks": "objection", "line": "; ".join(objections)})
        self._runner.exit(_made(Exit, end))

    def _stop(self) -> None:
        self._runner.stop()

    def _log(self, event: Event) -> None:
        if self._input:
            self._input = False
            return
        incident = event.name == "incident"
        self._fact(
            {
                "event": event.name,
                "level": event.level,
                "rank": event.rank,
                **{name: event.fields[name] for name in _WHERE if name in event.fields},
                # Sentences about causes and fixes belong to tests/unit/incidents.
                "line": event.text.partition(":")[0] if incident else event.text,
            }
        )

    def _fact(self, fact: dict[str, Any]) -> None:
        line = fact["line"].replace(str(self._folder), "STATE")
        self.facts.append({"at": round(self._clock.now - self._began, 1), **fact, "line": line})


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """An instance of today's class from recorded values; fields it no longer has are dropped."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def _configured(default: Any, changes: Mapping[str, Any]) -> Any:
    """Settings with the recorded changes; a setting that no longer exists is dropped."""
    values = {}
    for field in dataclasses.fields(default):
        if field.name in changes:
            usual, value = getattr(default, field.name), changes[field.name]
            if dataclasses.is_dataclass(usual):
                value = _configured(usual, value)
            elif isinstance(usual, tuple):
                value = tuple(value)
            values[field.name] = value
    return dataclasses.replace(default, **values)


def facts(path: Path) -> list[dict[str, Any]]:
    """The facts of one recording; of a run's step lines, only the first, the last and the count."""
    with gzip.open(path, "rt", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        start = json.loads(file.readline())
        replay = Replay(map(json.loads, file), start, Path(folder))
        observe = RankProcesses.observe
        RankProcesses.observe = lambda *_: replay.processes  # type: ignore[method-assign]
        try:
            found = replay.play()
        finally:
            RankProcesses.observe = observe  # type: ignore[method-assign]
            set_global_tracker(None)
    steps = [fact for fact in found if fact.get("event") == "inner_step"]
    shown = [f for f in found if f not in steps or f is steps[0] or f is steps[-1]]
    return [*shown, {"step_lines": len(steps)}]


def names() -> list[str]:
    return sorted(path.name.removesuffix(".jsonl.gz") for path in RUNS.glob("*.jsonl.gz"))


def stored(name: str) -> Path:
    return RUNS / f"{name}.facts.jsonl"


def main(chosen: Sequence[str]) -> None:
    for name in chosen or names():
        lines = [json.dumps(fact) for fact in facts(RUNS / f"{name}.jsonl.gz")]
        stored(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} facts")


if __name__ == "__main__":
    main(sys.argv[1:])
