"""What a rule answers. Standard library only: rules also run inside rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OUTCOMES = ("pass", "unknown", "warn", "block")
"""From harmless to hard; a decision is the worst of its verdicts."""


@dataclass(frozen=True)
class Verdict:
    """One rule's answer about one candidate."""

    rule: str
    outcome: str
    """One of OUTCOMES."""

    seen: Any
    """The number or text the rule looked at; None where it could not be read."""

    limit: Any
    """What it was compared with."""

    sentence: str
    """For people: what was seen, against which limit, what to do."""

    retry_after_steps: int | None = None
    """Inner steps until asking again can help."""

    retry_after_s: float | None = None
    """Seconds until asking again can help."""

    note: str | None = None
    """What else is to be known, where the sentence's words are fixed."""

    def as_dict(self) -> dict[str, Any]:
        document = asdict(self)
        if self.note is None:
            # A decision with all its verdicts has to fit into one entry of the journal.
            del document["note"]
        return document


def worst(verdicts: Iterable[Verdict]) -> str:
    """The hardest outcome; `pass` where there are none."""
    return max((v.outcome for v in verdicts), key=OUTCOMES.index, default="pass")
