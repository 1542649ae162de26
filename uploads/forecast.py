"""Forecast: will the minimum inner step be reached before the repo goes stale?

Pure. What can be known 40 minutes ahead should not be reported when it has happened.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """When the minimum is reached and when the repo goes stale, both in seconds from now."""

    min_inner_step: int
    eta_s: float
    stale_s: float
    accepted_from: int | None = None
    """The inner step from which validators accept; None where no profile says."""

    waiting_costs_s: float | None = None
    """Seconds without a score that the minimum costs beyond what validators ask for, while the
    archive of an AllReduce is published. None where nothing is lost, or it is not known."""

    @property
    def late(self) -> bool:
        """The repo goes stale first."""
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

    `unscored`: what is published scores nothing, so each step of waiting is one without a score.
    """
    left = max(min_inner_step - inner_step, 0)
    costs = None
    if unscored and accepted_from is not None:
        needed = max(accepted_from - inner_step, 0)
        costs = max(left - needed, 0) * step_s
    stale_s = max(limit_s - age_s, 0.0)
    return Forecast(min_inner_step, left * step_s, stale_s, accepted_from, costs)
