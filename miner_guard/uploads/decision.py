"""The gate's decision. Standard library only: the ranks create and read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.validators.facts import Verdict


@dataclass(frozen=True)
class GateDecision:
    """The gate's decision about one upload. Truthy if the upload may go out."""

    allowed: bool
    kind: str
    outer_step: int
    inner_step: int
    reason: str
    """Human-readable text after `UPLOAD BLOCKED: ` or `UPLOAD ALLOWED: `."""

    verdicts: tuple[Verdict, ...] = ()
    due: bool = False
    """The repo is past its target age."""

    stale: bool = False
    """The repo is past its limit."""

    shadow: bool = False
    """Shadow mode allowed an upload that the gate would have blocked."""

    retry_after_steps: int | None = None
    retry_after_s: float | None = None
    decided_at: float = 0.0
    """Wall time."""

    decision_id: str = ""
    """Same on every rank; key in the ledger."""

    record: Mapping[str, Any] = field(default_factory=dict)
    """Everything that a replay needs: candidate, settings, digest of the inputs, monotonic time."""

    def __bool__(self) -> bool:
        return self.allowed

    def as_dict(self) -> dict[str, Any]:
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        document["verdicts"] = [v.as_dict() for v in self.verdicts]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> GateDecision:
        fields = {name: document[name] for name in cls.__dataclass_fields__ if name in document}
        fields["verdicts"] = tuple(Verdict(**v) for v in document.get("verdicts", ()))
        return cls(**fields)
