"""Anomalies inserted into curves of many kinds are found, and the curves without them are quiet."""

from __future__ import annotations

import pytest

from tests.support import curve_judges
from tests.support.curve_judges import Judge, Report

_SEEDS = 3


def described(title: str, seen: Report) -> None:
    """The figures, for the test log."""
    print(f"\n{title}: {seen.quiet_share():.1%} of the quiet curves alarmed")
    print({kind: n for kind, (n, _) in seen.quiet.items() if n})
    for anomaly, (found, count) in seen.found.items():
        print(f"  {anomaly:14} {found}/{count}, {seen.alarms[anomaly]:.2f} alarms per curve")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "judges", "least"),
    [("live", curve_judges.LIVE, 0.85), ("whole traces", curve_judges.WHOLE, 0.8)],
)
def test_anomalies_are_found_and_quiet_curves_stay_quiet(
    title: str, judges: dict[str, Judge], least: float
) -> None:
    """Periodic slow steps (1.8 times the usual) raised 149 alarms, and an epoch's sawtooth raised
    eight."""
    seen = curve_judges.report(judges, _SEEDS)
    described(title, seen)
    assert seen.quiet_share() <= 0.03
    for anomaly in seen.found:
        assert seen.recall(anomaly) >= least, anomaly
        assert seen.alarms[anomaly] <= 1.5, f"{anomaly}: one alarm an episode"
