"""Asks the live judges and the judges of whole traces the same question: what is wrong, and
where?"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from miner_guard.config import LossSettings, StepSettings
from miner_guard.rank.layout import StepRecord
from miner_guard.watch import trace_reading as reading
from miner_guard.watch.curves import LossWatch
from miner_guard.watch.curves import judge as judge_trace
from miner_guard.watch.step_times import Regression, StepTimes
from tests.support import synthetic_curves as curves

_FIRST_STEP = 50_000
"""Traces start in the middle of a run: in a trace from the first step, the loss would have to
fall."""

Alarm = tuple[str, int]
"""Type, and index of the value."""

Judge = Callable[[curves.Curve], list[Alarm]]


def live_loss(values: curves.Curve) -> list[Alarm]:
    """The supervisor's warnings while the losses arrive."""
    watch = LossWatch(LossSettings())
    return [
        ("divergence" if a.type == "explosion" else a.type, index)
        for index, value in enumerate(values)
        for a in watch.observe(index, value)
        if a.severity != "info"
    ]


def live_steps(values: curves.Curve) -> list[Alarm]:
    """The warnings that the supervisor gives as the step times arrive."""
    return [(kind, index) for kind, index, certain in live_step_findings(values) if certain]


def live_step_findings(values: curves.Curve) -> list[tuple[str, int, bool]]:
    """Type, index of the value, and whether it is a warning."""
    times, found = StepTimes(StepSettings()), list[tuple[str, int, bool]]()
    for index, value in enumerate(values):
        step = StepRecord(total_steps=index, end=value, phases={"forward": value})
        for seen in times.observe(step):
            if isinstance(seen, Regression):
                found.append(("regime_change", index, True))
            else:
                found.append(("slow_steps", index, seen.weight == "episode"))
    return found


def _whole(name: str) -> Judge:
    def judge(values: curves.Curve) -> list[Alarm]:
        rows = (
            json.dumps({"step": step, name: value if value == value else "NaN"})
            for step, value in enumerate(values, _FIRST_STEP)
        )
        found = judge_trace(reading.read(rows))
        return [(a.type, a.at_step - _FIRST_STEP) for a in found if a.severity != "info"]

    return judge


LIVE = {"loss": live_loss, "step_time": live_steps}
WHOLE = {"loss": _whole("loss"), "step_time": _whole("step_time")}

_INJECTIONS: dict[str, tuple[str, Callable[[curves.Curve, random.Random], curves.Injected]]] = {
    "spike x2": ("loss", lambda curve, chance: curves.spike(curve, chance, 2)),
    "spike x5": ("loss", lambda curve, chance: curves.spike(curve, chance, 5)),
    "NaN": ("loss", curves.not_a_number),
    "divergence": ("loss", curves.divergence),
    "explosion": ("loss", curves.explosion),
    "step x3": ("step_time", curves.slow_step),
    "lasting x1.6": ("step_time", curves.lasting_slowdown),
}
_MEANINGLESS = {"near_zero", "policy_gradient"}
"""Kinds of curves whose noise is as large as an injected anomaly."""

_MAKERS = {"loss": curves.LOSSES, "step_time": curves.STEP_TIMES}


@dataclass
class Report:
    """What a judge finds in synthetic curves."""

    quiet_share: float
    """Share of the quiet curves that raised an alarm."""

    found: dict[str, tuple[int, int]]
    """By anomaly: how many were found, out of how many."""

    alarms: dict[str, float]
    """By anomaly: alarms per curve."""


def report(judges: dict[str, Judge], seeds: int) -> Report:
    """Every kind of curve, both quiet and with every anomaly that suits it, `seeds` times each."""
    made = {
        (what, kind): [maker(random.Random(f"{kind}{n}")) for n in range(seeds)]
        for what, makers in _MAKERS.items()
        for kind, maker in makers.items()
    }
    quiet = [bool(judges[what](each)) for (what, _), all_ in made.items() for each in all_]
    seen = Report(sum(quiet) / len(quiet), {}, {})
    for anomaly, (what, inject) in _INJECTIONS.items():
        hits, raised = [], 0
        for (of, kind), all_ in made.items():
            for seed, curve in enumerate(all_ if of == what and kind not in _MEANINGLESS else ()):
                bad = inject(curve, random.Random(f"{anomaly}{kind}{seed}"))
                answer = judges[what](bad.values)
                hits.append(any(t == bad.kind and bad.first <= i <= bad.last for t, i in answer))
                raised += len(answer)
        seen.found[anomaly] = sum(hits), len(hits)
        seen.alarms[anomaly] = raised / len(hits)
    return seen
