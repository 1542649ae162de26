"""Loss: block NaN and infinities; warn of a rising loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "loss"
POINTS = 10
"""Inner steps in the trend (source 004: check the last 10 steps)."""

RISING_P = 0.99


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block a non-finite loss; warn if it rises over the last 10 inner steps with P > 0.99."""
    loss, recent = facts.candidate.loss, facts.candidate.recent_losses
    if loss is None and not recent:
        return Verdict(RULE, "unknown", None, None, "the caller did not pass the loss")
    seen = recent[-1] if loss is None else loss
    if not math.isfinite(seen):
        words = f"loss is {seen}: gradient invalid. Restore the last good checkpoint"
        return Verdict(RULE, "block", str(seen), "finite", words)
    if len(recent) >= POINTS and all(math.isfinite(v) for v in recent[-POINTS:]):
        p = rising_probability(recent[-POINTS:])
        if p > RISING_P:
            first = recent[-POINTS]
            words = (
                f"loss rose over the last {POINTS} inner steps ({first:.3g} to "
                f"{seen:.3g}, P = {p:.3f})"
            )
            return Verdict(RULE, "warn", round(p, 4), RISING_P, words)
    return Verdict(RULE, "pass", round(seen, 4), "finite", f"loss {seen:.4g} is finite")


def rising_probability(values: Sequence[float]) -> float:
    """P(slope > 0) of a least-squares line through `values` (an even count of at least 4).

    Student's t with n - 2 degrees of freedom; the closed form for even degrees is Abramowitz &
    Stegun 26.7.4.
    """
    n = len(values)
    mean_x, mean_y = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((x - mean_x) ** 2 for x in range(n))
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in enumerate(values)) / spread
    left_over = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in enumerate(values))
    freedom = n - 2
    if left_over <= 1e-18 * max(mean_y * mean_y, 1e-300):
        return 0.5 if slope == 0 else float(slope > 0)
    t = slope / math.sqrt(left_over / freedom / spread)
    angle = math.atan(t / math.sqrt(freedom))
    term = total = 1.0
    for k in range(1, freedom // 2):
        term *= (2 * k - 1) / (2 * k) * math.cos(angle) ** 2
        total += term
    return 0.5 + math.sin(angle) * total / 2
