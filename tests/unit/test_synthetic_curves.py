"""Anomalies inserted into curves of many kinds are found, and the curves without them are quiet."""

from __future__ import annotations

import random

import pytest

from tests.support import curve_judges, synthetic_curves


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judges", "least"),
    [(curve_judges.LIVE, 0.85), (curve_judges.WHOLE, 0.8)],
    ids=["live", "whole traces"],
)
def test_anomalies_are_found_and_quiet_curves_stay_quiet(
    judges: dict[str, curve_judges.Judge], least: float
) -> None:
    """Periodic slow steps (1.8 times the usual) raised 149 alarms, and an epoch's sawtooth raised
    eight."""
    seen = curve_judges.report(judges, 3)
    print(seen)
    assert seen.quiet_share <= 0.03
    for anomaly, (found, count) in seen.found.items():
        assert found >= least * count, anomaly
        assert seen.alarms[anomaly] <= 1.5, f"{anomaly}: one alarm an episode"


@pytest.mark.parametrize("maker", [synthetic_curves.rollouts, synthetic_curves.episodes])
def test_what_a_reinforcement_learner_does_all_the_time_is_no_spike(
    maker: synthetic_curves.Maker,
) -> None:
    """PPO and A2C raised up to 143 alarms in 1,200 steps, and eight explosions."""
    found = [curve_judges.live_loss(maker(random.Random(seed))) for seed in range(10)]
    for kind, usual, most in (("spike", 1.5, 5), ("divergence", 0.2, 1)):
        alarms = [sum(k == kind for k, _ in each) for each in found]
        assert sum(alarms) / len(alarms) <= usual, kind
        assert max(alarms) <= most, kind
