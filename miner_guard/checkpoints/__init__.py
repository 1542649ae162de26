"""Checkpoints of a sharded run: on disk for every restart, in memory for the next launch.

A miner imports `Checkpointer` from here; docs/howto/checkpoints.md shows how.
"""

from __future__ import annotations

from miner_guard.checkpoints.checkpointer import Checkpointer, CheckpointError, Saved, Skipped
from miner_guard.checkpoints.manifest import MANIFEST, damage

__all__ = ["MANIFEST", "CheckpointError", "Checkpointer", "Saved", "Skipped", "damage"]
