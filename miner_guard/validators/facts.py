"""Inputs and output of the rules: the candidate, the published state, the network, a rule's
verdict, and the decision that the verdicts make. Plain data, no I/O; standard library only, because
rules also run inside rank 0.

None means unknown; a `reason` field says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """The upload that the miner wants to make."""

    kind: str
    """`gradient`, or `archive`: the upload after an AllReduce, which starts at inner step 0 and is
    required."""

    outer_step: int
    inner_step: int
    loss: float | None = None
    recent_losses: tuple[float, ...] = ()
    base_outer_step: int | None = None
    """The outer step of the global state that the miner loaded."""

    files: Mapping[str, Any] | None = None
    """The report on gradients.pt (`validators.inspection`), None without an inspection."""

    config: Mapping[str, Any] | None = None
    """The candidate's config.json."""

    metadata: Mapping[str, Any] | None = None
    """The candidate's metadata.json."""


@dataclass(frozen=True)
class Published:
    """The contents of the repo as of `seen_at`."""

    age_s: float | None = None
    """Age of the newest gradients.pt by the server's clock."""

    reason: str | None = "not checked yet"
    """Why `age_s` is None. None if the repo was read; an empty repo has `empty=True`."""

    empty: bool = False
    seen_at: float | None = None
    """Monotonic time of the read: a wall-clock step must not make the repo look younger."""

    outer_step: int | None = None
    inner_step: int | None = None
    revision: str | None = None
    size_bytes: int | None = None
    checksum: str | None = None
    metadata: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Network:
    """The data reported by the chain and the master's repo."""

    block: int | None = None
    outer_step: int | None = None
    blocks_since_allreduce: int | None = None
    commitment: str | None = None
    """`fingerprint` of the hotkey's on-chain commitment; the fingerprint of
    `""` if it has committed nothing."""

    registered: bool | None = None
    uid: int | None = None
    reason: str | None = "not checked"
    """Why nothing is known. None if the chain was read."""

    seen_at: float | None = None
    """Monotonic time of the read."""

    blocks_per_allreduce: int | None = None
    """Overrides the profile's value: the master uses a larger one after its first success."""


@dataclass(frozen=True)
class Facts:
    """Everything that a rule may read, including the current time."""

    candidate: Candidate
    published: Published = field(default_factory=Published)
    network: Network = field(default_factory=Network)
    now: float = 0.0
    """Monotonic seconds, on the same clock as `seen_at`."""

    credentials: str | None = None
    """`fingerprint` of the commitment that the credentials in use would
    produce."""

    bucket: str | None = None
    """Name of the bucket in use."""

    tried: bool = False
    """Whether the keys committed on chain have opened the bucket."""


def fingerprint(commitment: str | None) -> str | None:
    """`128:0f3a…`: length and digest, to compare commitments without storing them."""
    if commitment is None:
        return None
    return f"{len(commitment)}:{hashlib.sha256(commitment.encode()).hexdigest()[:16]}"


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
            # Few verdicts have one, and a decision shares the journal with everything else.
            del document["note"]
        return document


def worst(verdicts: Iterable[Verdict]) -> str:
    """The most severe outcome; `pass` for no verdicts."""
    return max((v.outcome for v in verdicts), key=OUTCOMES.index, default="pass")


@dataclass(frozen=True)
class Decision:
    """The answer to "may this upload go out?". Truthy if it may."""

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
    """Same on every rank; key in run.db."""

    def __bool__(self) -> bool:
        return self.allowed

    def as_dict(self) -> dict[str, Any]:
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        document["verdicts"] = [v.as_dict() for v in self.verdicts]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Decision:
        fields = {name: document[name] for name in cls.__dataclass_fields__ if name in document}
        fields["verdicts"] = tuple(Verdict(**v) for v in document.get("verdicts", ()))
        return cls(**fields)


# the files of a repo as validators read them: their keys in subnet 38, which the demo writes too

METADATA = "metadata.json"
"""The root copy is the pointer that validators start from; each epoch's folder has a copy too."""

GRADIENTS = "gradients.pt"


def gradients_key(outer_step: int) -> str:
    """Key of the gradients of `outer_step`."""
    return f"epoch-{outer_step}/{GRADIENTS}"


def config_key(outer_step: int) -> str:
    """Key of the config of `outer_step`."""
    return f"epoch-{outer_step}/config.json"


def whole(document: Mapping[str, Any] | None, name: str) -> int | None:
    """The field if it is a whole number. The rules do not use this: they parse the document as
    validators do (`read_inner_step`)."""
    value = (document or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_inner_step(metadata: Mapping[str, Any] | None) -> int | None:
    """The inner step as validators parse it: `int()` of the text after its last dot. None if that
    raises.

    They format it into a revision and parse it back (R:433), so they read 84.5 as 5, 84.0 as 0 and
    "84" as 84.
    """
    if metadata is None or "inner_step" not in metadata:
        return None
    try:
        return int(f"{metadata['inner_step']}".split(".")[-1])
    except ValueError:
        return None
