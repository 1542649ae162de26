"""Source 000's recommended configurations, and the budget that each implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miner_guard.config import CostSettings

PRESETS: Mapping[str, Mapping[str, float | bool]] = {
    "production": {
        "eval_steps": 200,
        "save_steps": 100,
        "validation_examples": 20,
        "enable_evolution": False,
        "enable_detail_collector": False,
        "monitoring_budget": 5.0,
    },
    "research": {
        "eval_steps": 50,
        "save_steps": 50,
        "validation_examples": 100,
        "enable_evolution": True,
        "enable_detail_collector": True,
        "monitoring_budget": 15.0,
    },
    "final_evaluation": {
        "eval_steps": 1000,
        "save_steps": 500,
        "validation_examples": 1000,
        "enable_evolution": False,
        "enable_detail_collector": False,
        "monitoring_budget": 2.0,
    },
}
"""Source 000's three tables, verbatim."""

_CRITICAL_FACTOR = 2.0
"""Source 000's critical limit (10 %) is twice its budget (5 %); the presets keep that ratio."""


@dataclass(frozen=True)
class Budget:
    """Limits on the cost of monitoring: percentages of training time, and seconds per call."""

    budget_pct: float = 5.0
    critical_pct: float = 10.0
    operation_warn_s: float = 30.0
    throttle: bool = False

    @classmethod
    def from_settings(cls, settings: CostSettings) -> Budget:
        """Return the budget in force; a preset overrides both shares."""
        if settings.preset is None:
            return cls(
                settings.budget_pct,
                settings.critical_pct,
                settings.operation_warn_s,
                settings.throttle,
            )
        budget = float(PRESETS[settings.preset]["monitoring_budget"])
        return cls(budget, budget * _CRITICAL_FACTOR, settings.operation_warn_s, settings.throttle)

    def status(self, share_pct: float) -> str:
        """Classify a share of training time: `ok`, `warning` or `critical`."""
        if share_pct > self.critical_pct:
            return "critical"
        return "warning" if share_pct > self.budget_pct else "ok"
