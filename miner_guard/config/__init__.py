"""Every setting of the guard, as plain dataclasses: one class per section of guard.toml.

Standard library only, so that the hook inside a rank can read its settings without importing
anything that the miner does not have. `miner_guard.config.loading` reads files and the environment,
checks the values, and remembers where each came from.

Units are in the names: `_s` seconds, `_gb` GiB, `_pct` per cent, `_ratio` a share between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from miner_guard.config.life import CostSettings, HangSettings, HealthSettings, RestartSettings
from miner_guard.config.outside import (
    AlertSettings,
    ChainSettings,
    GateSettings,
    HttpSettings,
    LogSettings,
    OtelSettings,
    RepoSettings,
)
from miner_guard.config.ranges import Range
from miner_guard.config.training import GpuSettings, LossSettings, MinerSettings, StepSettings

__all__ = [
    "AlertSettings",
    "ChainSettings",
    "Config",
    "CostSettings",
    "GateSettings",
    "GpuSettings",
    "HangSettings",
    "HealthSettings",
    "HttpSettings",
    "LogSettings",
    "LossSettings",
    "MinerSettings",
    "OtelSettings",
    "Range",
    "RepoSettings",
    "RestartSettings",
    "StepSettings",
]


@dataclass(frozen=True)
class Config:
    """All settings. The fields are named after the sections of guard.toml."""

    miner: MinerSettings = field(default_factory=MinerSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    hang: HangSettings = field(default_factory=HangSettings)
    restart: RestartSettings = field(default_factory=RestartSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    repo: RepoSettings = field(default_factory=RepoSettings)
    chain: ChainSettings = field(default_factory=ChainSettings)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    otel: OtelSettings = field(default_factory=OtelSettings)
    logs: LogSettings = field(default_factory=LogSettings)
