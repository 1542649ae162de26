"""The phases of a training step."""

PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "inference",
    "val_loss",
    "example_loss",
    "upload",
    "allreduce",
    "load_state",
    "pause",
    "monitor",
    "collective",
    "other",
)
"""Phases with their own column in a step record; the column `other` sums all others."""

SPECIAL_PHASES = ("inference", "val_loss", "upload", "allreduce", "load_state", "pause")
"""Detectors compare a step that contains one of these phases with similar steps, not with plain
training steps."""
