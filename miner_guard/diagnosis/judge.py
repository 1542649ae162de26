"""Runs all checks on one snapshot, in table order."""

from __future__ import annotations

from miner_guard.diagnosis import (
    cuda,
    deep,
    driver,
    environment,
    gpu_count,
    gpu_rows,
    held_memory,
    host,
    minimum,
    storage,
)
from miner_guard.diagnosis.check import Check, Snapshot

_SUBJECTS = (
    driver,
    gpu_count,
    cuda,
    gpu_rows,
    held_memory,
    host,
    environment,
    storage,
    minimum,
    deep,
)


def judge(snapshot: Snapshot) -> list[Check]:
    """Run all checks on `snapshot`. Pure: the same snapshot gives the same checks."""
    return [check for subject in _SUBJECTS for check in subject.checks(snapshot)]
