"""Source 000's known operations: what a call usually takes, how often it runs, and when to enable
it."""

from __future__ import annotations

import re
from dataclasses import dataclass

SAFE = "ALWAYS SAFE"
CAUTIOUS = "USE CAUTIOUSLY"
NEVER = "NEVER IN PRODUCTION"


@dataclass(frozen=True)
class KnownOperation:
    """One operation of source 000's cost table or decision framework."""

    name: str
    advice: str
    """When to enable it: `SAFE`, `CAUTIOUS` or `NEVER`."""

    why: str
    call_s: tuple[float, float] | None = None
    """Usual range of seconds per call; None if source 000 gives none."""

    every_steps: int | None = None
    every_s: float | None = None
    aliases: tuple[str, ...] = ()


KNOWN = (
    KnownOperation(
        "live inference",
        SAFE,
        "a few examples show what the model learns",
        call_s=(1.0, 5.0),
        every_steps=200,
        aliases=("inference", "eval steps"),
    ),
    KnownOperation(
        "status updates",
        SAFE,
        "progress tracking",
        call_s=(0.0, 0.01),
        every_s=5.0,
        aliases=("status update", "status"),
    ),
    KnownOperation(
        "checkpoints", SAFE, "saving the model", every_steps=100, aliases=("checkpoint", "save")
    ),
    KnownOperation(
        "validation loss",
        CAUTIOUS,
        "use fewer than 100 examples, or run it less often",
        call_s=(30.0, 120.0),
        every_steps=200,
        aliases=("validation", "val loss"),
    ),
    KnownOperation(
        "detail collector",
        CAUTIOUS,
        "only to debug a specific problem",
        call_s=(0.1, 0.5),
        every_steps=50,
        aliases=("details",),
    ),
    KnownOperation("training data browser", CAUTIOUS, "only while somebody watches"),
    KnownOperation(
        "evolution snapshot",
        NEVER,
        "far too expensive, only for research",
        call_s=(60.0, 300.0),
        every_steps=500,
        aliases=("evolution", "evolution tracking", "evolution tracker"),
    ),
    KnownOperation("per step inference", NEVER, "blocks training completely", every_steps=1),
    KnownOperation(
        "large validation sets",
        NEVER,
        "use 100 examples at most",
        aliases=("large validation set", "full validation"),
    ),
)


def known(operation: str) -> KnownOperation | None:
    """Find a known operation by name or alias in any spelling, such as `evolution_snapshot` or
    `EvolutionSnapshot`; None if there is no match."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", operation)
    plain = re.sub(r"[^a-z0-9]+", " ", spaced.lower()).strip()
    return next((row for row in KNOWN if plain == row.name or plain in row.aliases), None)
