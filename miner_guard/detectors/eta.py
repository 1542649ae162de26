"""Computes a running miner's throughput, and the time to its next upload and outer step, from its
training settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from miner_guard.config import GateSettings, MinerSettings
from miner_guard.rank.journal import TrainingEntry

_FROM_ENTRY = (
    "batch_size",
    "effective_batch_size",
    "world_size",
    "accumulation_steps",
    "params",
    "upload_steps",
    "inner_steps_per_outer",
    "tokens_per_step",
)


@dataclass(frozen=True)
class TrainingFacts:
    """Training settings from the hook, which takes precedence, or from the configuration; None if
    unknown."""

    batch_size: int | None = None
    effective_batch_size: int | None = None
    world_size: int | None = None
    accumulation_steps: int | None = None
    params: int | None = None
    upload_steps: int | None = None
    inner_steps_per_outer: int | None = None
    tokens_per_step: int | None = None
    min_inner_step: int = 0

    @staticmethod
    def from_settings(miner: MinerSettings, gate: GateSettings) -> TrainingFacts:
        """The facts that guard.toml contains."""
        return TrainingFacts(
            batch_size=miner.batch_size,
            effective_batch_size=miner.effective_batch_size,
            upload_steps=miner.upload_steps,
            inner_steps_per_outer=miner.inner_steps_per_outer,
            min_inner_step=gate.min_inner_step,
        )

    def with_entry(self, entry: TrainingEntry) -> TrainingFacts:
        """These facts, updated with the hook's `training` entry."""
        known = {name: value for name in _FROM_ENTRY if _is_count(value := getattr(entry, name))}
        return replace(self, **known)

    def samples_per_s(self, step_time_s: float | None) -> float | None:
        """Samples per second, summed over all ranks."""
        if self.effective_batch_size is None or not step_time_s:
            return None
        return self.effective_batch_size / step_time_s

    def tokens_per_s(self, tokens: int | None, step_time_s: float | None) -> float | None:
        """Tokens per second, from the step's token count, else from the settings."""
        count = tokens if tokens is not None else self.tokens_per_step
        return count / step_time_s if count is not None and step_time_s else None

    def eta_upload_s(
        self, inner_step: int | None, step_time_s: float | None, since_s: float = 0.0
    ) -> float | None:
        """Return the seconds until the miner's next upload; None if unknown.

        The miner uploads at multiples of `upload_steps` once the gate's minimum is reached. If the
        cadence is unknown, this is the time to the minimum. `since_s` is the time since the last
        step ended.
        """
        if inner_step is None or not step_time_s:
            return None
        if self.upload_steps is None:
            target = self.min_inner_step if inner_step < self.min_inner_step else None
        else:
            target = next_multiple(max(inner_step + 1, self.min_inner_step), self.upload_steps)
        return None if target is None else max(0.0, (target - inner_step) * step_time_s - since_s)

    def eta_outer_s(
        self, inner_step: int | None, step_time_s: float | None, since_s: float = 0.0
    ) -> float | None:
        """Return the seconds until the next outer step; None if unknown."""
        if inner_step is None or not step_time_s or self.inner_steps_per_outer is None:
            return None
        return max(0.0, (self.inner_steps_per_outer - inner_step) * step_time_s - since_s)


def next_multiple(minimum: int, of: int) -> int:
    """The smallest positive multiple of `of` that is not less than `minimum`."""
    return max(-(-minimum // of), 1) * of


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
