"""Checkpoints of a sharded run: on disk for every restart, in memory for the next launch.

A miner imports `Checkpointer` from here; docs/howto/checkpoints.md shows how.
"""

from __future__ import annotations

from miner_guard.checkpoints.checkpointer import (
    MANIFEST,
    Checkpointer,
    CheckpointError,
    Saved,
    Skipped,
    damage,
)

__all__ = ["MANIFEST", "CheckpointError", "Checkpointer", "Saved", "Skipped", "damage"]
