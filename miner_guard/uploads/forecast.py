"""Forecast: will the miner reach the minimum inner step before the repo goes stale?

Pure. A delay that can be predicted 40 minutes ahead must be reported then, not after the fact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """The time until training reaches the minimum and until the repo goes stale, both in seconds
    from now."""

    min_inner_step: int
    eta_s: float
    stale_s: float
    accepted_from: int | None = None
    """The lowest inner step that validators accept; None if no profile defines it."""

    waiting_costs_s: float | None = None
    """While the published upload is an AllReduce's archive: how many more seconds the miner goes
    without a score because it waits for the operator's minimum rather than the validators'. None if
    no time is lost or the number is unknown."""

    @property
    def late(self) -> bool:
        """Whether the repo will go stale before training reaches the minimum."""
        return self.eta_s > self.stale_s


def forecast(
    *,
    inner_step: int,
    step_s: float,
    min_inner_step: int,
    age_s: float,
    limit_s: float,
    accepted_from: int | None = None,
    unscored: bool = False,
) -> Forecast:
    """The forecast after `inner_step` inner steps of `step_s` seconds, for a repo `age_s` old.

    `unscored`: validators give the published files no score, so each step of waiting earns nothing.
    """
    left = max(min_inner_step - inner_step, 0)
    costs = None
    if unscored and accepted_from is not None:
        needed = max(accepted_from - inner_step, 0)
        costs = max(left - needed, 0) * step_s
    stale_s = max(limit_s - age_s, 0.0)
    return Forecast(min_inner_step, left * step_s, stale_s, accepted_from, costs)
