"""A rule's verdict. Standard library only: rules also run inside rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OUTCOMES = ("pass", "unknown", "warn", "block")
"""In order of increasing severity; a decision is the worst of its verdicts."""


@dataclass(frozen=True)
class Verdict:
    """One rule's verdict on one candidate."""

    rule: str
    outcome: str
    """One of OUTCOMES."""

    seen: Any
    """The number or text that the rule judged; None if unreadable."""

    limit: Any
    """The limit that `seen` was compared with."""

    sentence: str
    """Human-readable: the observed value, the limit, and what to do."""

    retry_after_steps: int | None = None
    """Inner steps until a retry can help."""

    retry_after_s: float | None = None
    """Seconds until a retry can help."""

    note: str | None = None
    """Additional information, for a sentence with fixed wording."""

    def as_dict(self) -> dict[str, Any]:
        document = asdict(self)
        if self.note is None:
            # A decision with all its verdicts must fit in one journal entry.
            del document["note"]
        return document


def worst(verdicts: Iterable[Verdict]) -> str:
    """The most severe outcome; `pass` for no verdicts."""
    return max((v.outcome for v in verdicts), key=OUTCOMES.index, default="pass")
