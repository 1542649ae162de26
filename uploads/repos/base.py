"""Where a miner publishes, behind one Protocol: a local folder, S3/R2, Hugging Face.

What a validator reads is the same everywhere: `metadata.json` at the root names the outer and the
inner step, `epoch-N/` holds `gradients.pt`, `config.json` and `metadata.json`. Publishing has two
phases: `stage` moves the bytes and shows nothing, `commit` makes them visible in the order given,
each object at once and the root metadata last. What a reader can see while it does: see
`uploads.publisher`.

Anything here may hang with its server. Within the supervisor, look with `uploads.repos.look_at`,
which does it in a child with a deadline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from validators.facts import Published
from validators.metadata import mixed

GRADIENTS = "gradients.pt"
CONFIG = "config.json"
METADATA = "metadata.json"
"""At the root it is the pointer that validators start from; a copy lies in each epoch's folder."""

BLOCK_BYTES = 1024 * 1024
"""Read and written at a time."""

LOOK_AGAIN_S = 1.5
"""Between two looks of an audit: reads may be two seconds behind the last write."""

LOOKS = 3
"""A look that falls between two revisions is repeated; the switch takes a few short requests."""

DOCUMENT_LIMIT = 16 * 1024 * 1024
"""A JSON document larger than this is refused unread."""

Progress = Callable[[int], None]
"""Told the number of bytes that were moved since the last call; from any thread."""


Notes = MutableMapping[str, Any]
"""JSON that survives the publisher: what the repo needs to continue with a staged object that was
cut off."""


def epoch_key(outer_step: int, name: str) -> str:
    """Key of one of an epoch's files: `epoch-56/gradients.pt`."""
    return f"epoch-{outer_step}/{name}"


class RepoError(Exception):
    """The repo refused or did not answer. The message is for people: what happened and what to
    do."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient
        """Trying again may help: throttled, reset, timed out."""


class Missing(RepoError):
    """The repo was read, and holds no such object."""


class Refused(RepoError):
    """The storage's definite answer to these keys is no: repeating the request changes nothing."""


class Unreadable(RepoError):
    """The storage keeps this object from every reader: encrypted with a customer's key, or
    archived."""


class Differs(RepoError):
    """What was committed reads back as something else: changed on the way, or read too early."""


class Damaged(RepoError):
    """The repo was read, and holds no JSON object where validators read one."""


@dataclass(frozen=True)
class ObjectInfo:
    """One published object."""

    key: str
    size_bytes: int
    age_s: float
    """Since the last change, by the server's clock: this host's has no part in it."""

    checksum: str | None
    """As the repo gives it: an ETag, a sha256; None where it gives none."""


@dataclass(frozen=True)
class StagedObject:
    """A staged object: its bytes are with the repo (or ready to go), and nobody sees them. JSON
    through and through."""

    key: str
    size_bytes: int
    data: Mapping[str, Any] = field(default_factory=dict)
    """The repo's own notes: upload id and parts, a draft's name, the path of the source."""

    checksum: str | None = None
    """What the repo will give for it, as far as can be known before it is shown."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Repo(Protocol):
    """One published repo. All methods but `label` may block for the network and raise RepoError."""

    @property
    def label(self) -> str:
        """Name for people and for the lock: `bucket:llama-4b-ws-4-007`."""
        ...

    def state(self) -> Published:
        """What a validator would find. Raises RepoError where it can't be read; an empty repo is an
        answer."""
        ...

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Published objects below `prefix`, by key."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """One object's facts. Raises Missing."""
        ...

    def get(self, key: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        """One object's bytes. Raises Missing, and RepoError for one larger than `limit`."""
        ...

    def save(self, key: str, path: Path, limit: int) -> None:
        """One object's bytes into a file, without holding them. Raises as `get`."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write one small object, at once."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object; one that is not there is no error."""
        ...

    def stage(self, key: str, path: Path, progress: Progress, notes: Notes) -> StagedObject:
        """Move the bytes of `path`, unseen. What an earlier attempt had sent, by its `notes`, is
        not sent again."""
        ...

    def commit(self, tickets: Sequence[StagedObject], revision: str) -> None:
        """Make staged objects visible, in order. Repeating it after a death in the middle completes
        it."""
        ...

    def abort(self, tickets: Sequence[StagedObject]) -> None:
        """Forget staged objects that were not committed."""
        ...

    def sweep(self) -> int:
        """Remove what dead publishers staged and left; returns how many. Only for who holds the
        repo's lock."""
        ...

    def confirm(self, ticket: StagedObject) -> ObjectInfo:
        """Read back a committed object: size and checksum as staged. Raises RepoError saying what
        differs."""
        ...


def document(repo: Repo, key: str) -> dict[str, Any] | None:
    """The JSON object at `key`, None where there is not one. Raises RepoError; Damaged for what is
    no JSON object."""
    try:
        return parsed(key, repo.get(key))
    except Missing:
        return None


def parsed(key: str, data: bytes) -> dict[str, Any]:
    """The JSON object that `data` of `key` is. Raises Damaged.

    Read as validators do: bytes of metadata.json in any of JSON's encodings, of others as a file of
    UTF-8.
    """
    try:
        found = json.loads(data if key.rpartition("/")[2] == METADATA else data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{key} is not JSON ({error}); publish again") from error
    if not isinstance(found, dict):
        raise Damaged(f"{key} is not a JSON object; publish again")
    return found


def published_state(repo: Repo, now: float) -> Published:
    """`Repo.state` for a repo of objects; `now` is this host's wall time, stored as `seen_at`
    only."""
    for _ in range(LOOKS):
        seen = _seen_once(repo, now)
        if mixed(seen.metadata, seen.size_bytes, seen.checksum) is None:
            break
    return seen


def _seen_once(repo: Repo, now: float) -> Published:
    metadata = document(repo, METADATA)
    outer = _count(metadata, "outer_step")
    entry = _gradients(repo, outer)
    if entry is None:
        reason = (
            None
            if metadata is None
            else f"metadata.json names outer step {outer}, which has no gradients.pt"
        )
        return Published(
            reason=reason, empty=metadata is None, seen_at=now, outer_step=outer, metadata=metadata
        )
    inner = _count(metadata, "inner_step")
    run = metadata.get("run") if metadata else None
    known = None not in (run, outer, inner)
    return Published(
        age_s=entry.age_s,
        reason=None,
        seen_at=now,
        outer_step=outer,
        inner_step=inner,
        revision=f"{run}.{outer}.{inner}" if known else None,
        size_bytes=entry.size_bytes,
        checksum=entry.checksum,
        metadata=metadata,
        config=document(repo, f"{entry.key.rpartition('/')[0]}/{CONFIG}"),
    )


def _count(metadata: Mapping[str, Any] | None, key: str) -> int | None:
    value = metadata.get(key) if metadata else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _gradients(repo: Repo, outer_step: int | None) -> ObjectInfo | None:
    if outer_step is not None:
        try:
            return repo.head(epoch_key(outer_step, GRADIENTS))
        except Missing:
            return None
    found = [e for e in repo.list("epoch-") if e.key.endswith("/" + GRADIENTS)]
    return min(found, key=lambda e: e.age_s, default=None)
