"""The entries in the journal of a rank's record, which holds everything that a rank must not lose.

In the journal an entry is a JSON object with the keys `kind` and `t`. What is None is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One entry. `t` is the monotonic time, in seconds, at which it was written; if it is 0, the
    writer fills it in."""

    KIND: ClassVar[str] = ""
    t: float = 0.0

    def to_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        present = {name: value for name, value in values.items() if value is not None}
        if not self.t:
            del present["t"]
        return {"kind": self.KIND, **present}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> JournalEntry:
        """Parse a document of this kind. Raises TypeError if a field is missing."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in names})


@dataclass(frozen=True, kw_only=True)
class EventEntry(JournalEntry):
    KIND = "event"

    event: str
    level: str
    text: str
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DecisionEntry(JournalEntry):
    """A gate decision. Only rank 0 writes these."""

    KIND = "decision"

    decision: Mapping[str, Any]
    """`Decision.as_dict()`."""


@dataclass(frozen=True, kw_only=True)
class UploadEntry(JournalEntry):
    """The start or end of an upload. Rank 0 writes these; any other rank writes one only if the
    upload fails there."""

    KIND = "upload"

    phase: str
    """`started`, `finished` or `failed`."""

    decision_id: str = ""
    """Empty if the decision is unknown, because the guard saw the upload in the miner's log."""

    outer_step: int | None = None
    inner_step: int | None = None
    upload_kind: str = "gradient"
    """`gradient` or `archive`."""

    tag: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    attempts: int | None = None
    checksum: str | None = None
    """The first 32 characters of the sha256. The guard would redact the full digest, because it
    looks like a private key."""

    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class DiagnosisEntry(JournalEntry):
    """The diagnosis that rank 0 gathered from all ranks; see `rank.diagnose.report`."""

    KIND = "diagnosis"

    reports: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TrainingEntry(JournalEntry):
    """The training settings that the hook knows; None means not reported."""

    KIND = "training"

    batch_size: int | None = None
    effective_batch_size: int | None = None
    world_size: int | None = None
    accumulation_steps: int | None = None
    params: int | None = None
    model_name: str | None = None
    upload_steps: int | None = None
    inner_steps_per_outer: int | None = None
    tokens_per_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry(JournalEntry):
    KIND = "checkpoint"

    path: str
    step: int | None = None
    seconds: float | None = None
    size_bytes: int | None = None
    complete: bool = True


@dataclass(frozen=True, kw_only=True)
class CostEntry(JournalEntry):
    """The cost of a monitoring operation since its last entry."""

    KIND = "cost"

    operation: str
    seconds: float
    blocking: bool = True
    """Whether training waited for the operation."""

    count: int = 1


_KINDS = {cls.KIND: cls for cls in JournalEntry.__subclasses__()}


def parse(document: Mapping[str, Any]) -> JournalEntry | None:
    """Parse a document from the journal; None for a kind that this version does not know."""
    cls = _KINDS.get(str(document.get("kind")))
    try:
        return None if cls is None else cls.from_json(document)
    except TypeError:
        return None
