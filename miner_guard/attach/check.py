"""Shows what `attach = "log"` would read from a log: steps, pushes, and the lines that almost
match."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.detectors.log_lines import LogSteps, Patterns, PhaseLine, PushLine, read
from miner_guard.detectors.step_grammar import Miss, StepLine

_MISSES_KEPT = 5
_QUOTED = 160

FIELDS = ("loss", "seconds", "lr", "grad_norm", "gpu_gb")
"""Values that a step line may contain besides the step number."""


def quoted(line: str) -> str:
    """Shorten `line` for a message: collapse runs of spaces and keep at most 160 characters."""
    text = " ".join(line.split())
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}…"


@dataclass(frozen=True)
class StepSeen:
    """A step found in the log, and the line that reports it."""

    place: int
    """1-based line number."""

    step: StepLine
    text: str


@dataclass
class LogCheck:
    lines: int = 0
    steps: list[StepSeen] = field(default_factory=list)
    pushes: int = 0
    failed_pushes: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    """Number of lines that report each phase."""

    misses: list[tuple[int, Miss, str]] = field(default_factory=list)
    """Near misses, closest first: the line number, what the line lacks, and the line."""

    def counted(self) -> Mapping[str, int]:
        return {
            name: sum(getattr(seen.step, name) is not None for seen in self.steps)
            for name in FIELDS
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "steps": [
                {
                    "line": seen.place,
                    "outer_step": seen.step.outer,
                    "epoch": seen.step.epoch,
                    "step": seen.step.inner,
                    **{name: getattr(seen.step, name) for name in FIELDS},
                }
                for seen in self.steps
            ],
            "pushes": self.pushes,
            "failed_pushes": self.failed_pushes,
            "phases": self.phases,
            "nearest_misses": [
                {"line": place, "why": miss.why, "text": text} for place, miss, text in self.misses
            ],
        }


def check(lines: Iterable[str], patterns: Patterns) -> LogCheck:
    """Read a log as the `log_attach` monitor would. It does not know when lines arrived, so the
    only duration known for a step is the one printed on its line."""
    result, steps = LogCheck(), LogSteps(-math.inf)
    for place, raw in enumerate(lines, 1):
        result.lines = place
        for text in filter(None, raw.rstrip("\n").split("\r")):
            _take(result, steps, (place, text), patterns)
    for logged in steps.finish(float(result.lines)):
        result.steps.append(StepSeen(result.lines, logged.line, "(the end of the log)"))
    return result


def _take(result: LogCheck, steps: LogSteps, numbered: tuple[int, str], patterns: Patterns) -> None:
    place, text = numbered
    parsed = read(text, patterns)
    if isinstance(parsed, StepLine):
        for logged in steps.observe(parsed, float(place)):
            result.steps.append(StepSeen(place, logged.line, quoted(text)))
    elif isinstance(parsed, PushLine):
        result.pushes += parsed.error is None
        result.failed_pushes += parsed.error is not None
    elif isinstance(parsed, PhaseLine):
        name = parsed.phase or "training"
        result.phases[name] = result.phases.get(name, 0) + 1
    elif isinstance(parsed, Miss):
        result.misses.append((place, parsed, quoted(text)))
        # The sort is stable, so the earliest of several equally close lines are kept.
        result.misses.sort(key=lambda miss: -miss[1].nearness)
        del result.misses[_MISSES_KEPT:]
