"""Explains why steps are slow although the model is on the GPU: distinguishes the causes that
source 004 lists under problem 2.

Checks, in this order: throttled clocks, starvation by data loading, waiting in collectives, more
accumulation steps than the step time allows. Returns None if no measurement supports any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miner_guard.config import StepSettings
from miner_guard.detectors.eta import TrainingFacts

_DOMINATES = 0.4
"""Minimum share of the step for a waiting phase to count as the cause."""


@dataclass(frozen=True)
class Explanation:
    """The cause and the numbers behind it."""

    cause: str
    arithmetic: str


def explain(
    step_time_s: float,
    phases: Mapping[str, float],
    facts: TrainingFacts,
    settings: StepSettings,
    *,
    throttle_reasons: Sequence[str] = (),
    gpu_power_share: float | None = None,
) -> Explanation | None:
    """The likeliest cause of steps that take `step_time_s`. `phases` are median seconds;
    `gpu_power_share` is the power draw as a share of the limit."""
    if throttle_reasons:
        return Explanation(
            "GPU throttled", f"{', '.join(throttle_reasons)}; step {step_time_s:.1f}s"
        )
    data = phases.get("data", 0.0)
    if data > _DOMINATES * step_time_s:
        power = (
            "" if gpu_power_share is None else f", GPU at {gpu_power_share:.0%} of its power limit"
        )
        return Explanation(
            "starved by data",
            f"data {data:.1f}s of a {step_time_s:.1f}s step ({data / step_time_s:.0%}){power}",
        )
    waiting = phases.get("collective", 0.0)
    if waiting > _DOMINATES * step_time_s:
        return Explanation(
            "waiting in collectives",
            f"collectives {waiting:.1f}s of a {step_time_s:.1f}s step "
            f"({waiting / step_time_s:.0%}): "
            "another rank or the network is slow",
        )
    return _accumulation(step_time_s, facts, settings)


def _accumulation(
    step_time_s: float, facts: TrainingFacts, settings: StepSettings
) -> Explanation | None:
    steps = facts.accumulation_steps
    if steps is None or steps < 2 or step_time_s <= settings.acceptable_s:
        return None
    each = step_time_s / steps
    fitting = max(1, int(settings.good_s / each))
    if fitting >= steps:
        return None
    batch = "" if facts.batch_size is None else f" (effective batch {fitting * facts.batch_size})"
    return Explanation(
        "accumulation too high",
        f"{steps} accumulation steps x {each * 1000:.0f} ms = {step_time_s:.0f}s; "
        f"{settings.good_s:.0f}s would fit {fitting}{batch}",
    )
