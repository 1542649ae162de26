"""Records what reaches the watchers of a real guard: `python -m tests.replay.record NAME -- ARGS`
runs `miner-guard ARGS` and writes runs/NAME.jsonl.gz.

A recording names no class of the guard. Its first line holds the settings and the clocks; each
further line is [monotonic time, kind, values…]:

    launch {command, pid, attempt, started} · exit {…} · end_output · stop
    steps RANK [{…}, …]    only values that differ from the step's defaults
    entry RANK {…}         a journal entry
    out TEXT               output of the miner
    tick {RANK: {…}, …}    header values that changed since the last tick; a rank not listed is gone
    processes {gone, stopped, absent, elsewhere}    the ranks' processes, when they change
    status {SECTION: …}    sections of the state that no replayed watcher writes
    event {…}            an event that no replayed watcher raised
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miner_guard.config import Config
from miner_guard.watch.base import Monitor
from miner_guard.watch.hang import RankProcesses
from miner_guard.watch.runner import MonitorRunner

RUNS = Path(__file__).with_name("runs")
OUTSIDE = frozenset({"health", "chain", "uploads", "audit", "alerts", "metrics", "otel", "nodes"})
"""Watchers that ask the world outside: their events and sections are inputs of a replay."""

_REPO = Path(__file__).resolve().parents[2]
_HEALTH_EVERY_S = 10.0
_NONE: dict[str, Any] = {}


class Recorder:
    """Writes one recording."""

    def __init__(self, path: Path, *, monotonic: float, wall: float) -> None:
        self._file = gzip.GzipFile(path, "wb", mtime=0)
        self._start = {"monotonic": monotonic, "wall": wall}
        self._headers: dict[str, dict[str, Any]] = {}
        self._sections: dict[str, Any] = {}
        self._processes: Any = None
        self._health_at = float("-inf")
        self.config: Config | None = None
        self.clock: Callable[[], float] = time.monotonic

    def begin(self, config: Config, clock: Callable[[], float]) -> None:
        self.config, self.clock = config, clock
        self._line({**self._start, "config": _changed(config, Config())})

    def put(self, kind: str, *values: Any) -> None:
        self._line([round(self.clock(), 4), kind, *values])

    def tick(self, ranks: Mapping[int, Any]) -> None:
        headers = {str(rank): _plain(header) for rank, header in ranks.items()}
        changes = {
            rank: {
                k: v for k, v in header.items() if self._headers.get(rank, _NONE).get(k, _NONE) != v
            }
            for rank, header in headers.items()
        }
        self._headers = headers
        self.put("tick", changes)

    def status(self, documents: Mapping[str, Any], replayed: frozenset[str]) -> None:
        changed = {}
        for name, section in documents.items():
            if name in replayed or name in ("updated", "verdict") or not self._moved(name, section):
                continue
            self._sections[name] = changed[name] = section
        if changed:
            self.put("status", changed)

    def _moved(self, name: str, section: Any) -> bool:
        before = self._sections.get(name)
        if before == section:
            return False
        if name != "health" or not isinstance(before, dict) or not isinstance(section, dict):
            return True
        quiet = all(_still(before.get(k), section.get(k)) for k in ("gpus", "unknown"))
        if quiet and self.clock() - self._health_at < _HEALTH_EVERY_S:
            return False
        self._health_at = self.clock()
        return True

    def processes(self, now: Any) -> None:
        plain = {
            "gone": sorted(now.gone),
            "stopped": sorted(now.stopped),
            "absent": sorted(now.absent),
            "elsewhere": now.elsewhere,
        }
        if plain != self._processes:
            self._processes = plain
            self.put("processes", plain)

    def close(self) -> None:
        self._file.close()

    def _line(self, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"), default=str)
        for private, public in (
            (str(_REPO), "/srv/miner-guard"),
            (sys.prefix, "/srv/venv"),
            (sys.base_prefix, "/usr"),
            (socket.gethostname(), "host"),
        ):
            text = text.replace(private, public)
        self._file.write(text.encode() + b"\n")


def _still(before: Any, after: Any) -> bool:
    """Whether two samples differ only in the time at which they were taken."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {**before, "taken": 0} == {**after, "taken": 0}
    return bool(before == after)


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict, floats shortened."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {k: float(f"{v:.9g}") if isinstance(v, float) else v for k, v in fields.items()}


def _changed(value: Any, default: Any) -> dict[str, Any]:
    changed = {}
    for field in dataclasses.fields(value):
        mine, usual = getattr(value, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(mine):
            if inner := _changed(mine, usual):
                changed[field.name] = inner
        elif mine != usual:
            changed[field.name] = list(mine) if isinstance(mine, tuple) else mine
    return changed


def _step(step: Any) -> dict[str, Any]:
    empty = _plain(type(step)())
    return {
        k: v
        for k, v in _plain(step).items()
        if v != empty.get(k) and not (isinstance(v, float) and v != v and k != "loss")
    }


def _own(frame: Any) -> bool:
    """Whether a replayed watcher is on the stack: a replay raises its event by itself."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Monitor):
            return owner.name not in OUTSIDE
        frame = frame.f_back
    return False


def install(recorder: Recorder) -> None:
    """Record everything that any `MonitorRunner` of this process passes on."""
    own: set[int] = set()
    kept: list[Any] = []

    def before(name: str, note: Callable[..., None]) -> None:
        real = getattr(MonitorRunner, name)

        def recorded(self: MonitorRunner, *args: Any, **more: Any) -> Any:
            if recorder.config is None and self.monitors:
                context = self.monitors[0].context
                recorder.begin(context.config, context.clock.monotonic)
            if recorder.config is not None:
                note(self, *args, **more)
            return real(self, *args, **more)

        setattr(MonitorRunner, name, recorded)

    def tick(self: MonitorRunner, now: float, ranks: Mapping[int, Any]) -> None:
        replayed = frozenset(m.name for m in self.monitors) - OUTSIDE
        recorder.status(self.monitors[0].context.status(), replayed)
        recorder.tick(ranks)

    def event(self: MonitorRunner, found: Any, source: Any = None, depth: int = 0) -> None:
        if id(found) in own or (source is not None and source.name not in OUTSIDE):
            return
        if source is None and _own(sys._getframe(2)):
            return
        recorder.put("event", found.to_json())

    def text(chunk: bytes) -> str:
        return bytes(chunk).decode("utf-8", "surrogateescape")

    before("launch", lambda _self, launch: recorder.put("launch", _plain(launch)))
    before(
        "steps",
        lambda _self, rank, steps: recorder.put("steps", rank, [_step(step) for step in steps]),
    )
    before("entry", lambda _self, rank, entry: recorder.put("entry", rank, dict(entry)))
    before("output", lambda _self, chunk: recorder.put("out", text(chunk)))
    before("tick", tick)
    before("exit", lambda _self, end: recorder.put("exit", _plain(end)))
    before("stop", lambda _self: recorder.put("stop"))
    before("event", event)

    observe = RankProcesses.observe

    def observed(self: RankProcesses) -> Any:
        result = observe(self)
        recorder.processes(result)
        return result

    RankProcesses.observe = observed  # type: ignore[method-assign]

    with contextlib.suppress(ImportError):
        from miner_guard.guard.app import GuardApp

        report = GuardApp.report

        def reported(self: GuardApp, found: Any) -> None:
            if _own(sys._getframe(1)):
                own.add(id(found))
                kept.append(found)
            report(self, found)

        GuardApp.report = reported  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    name, separator, *command = arguments
    assert separator == "--", "python -m tests.replay.record NAME -- ARGS"
    from miner_guard.cli.main import run

    recorder = Recorder(RUNS / f"{name}.jsonl.gz", monotonic=time.monotonic(), wall=time.time())
    install(recorder)
    leave = os._exit

    def close(code: int) -> None:
        recorder.close()
        leave(code)

    os._exit = close  # type: ignore[assignment]
    try:
        code = run(command)
    finally:
        recorder.close()
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
