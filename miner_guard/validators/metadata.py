"""metadata.json: the root document that validators start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "metadata"
FILES = "files"
"""The key in metadata.json that maps each file's name to its `FileRecord`. Only our publisher
writes it (`miner_guard.uploads.publisher`); validators ignore it."""


@dataclass(frozen=True)
class FileRecord:
    """A published file, as described by the metadata published with it."""

    size_bytes: int | None = None
    checksum: str | None = None


@dataclass(frozen=True)
class RootMetadata:
    """The fields of metadata.json that our publisher, probes and audit read; None for one that is
    missing or has the wrong type. The rules do not use this: they parse the document as validators
    do (`read_inner_step`)."""

    outer_step: int | None = None
    inner_step: int | None = None
    run: str | int | None = None
    gradients: FileRecord = FileRecord()

    @classmethod
    def of(cls, document: Mapping[str, Any] | None) -> RootMetadata:
        """The document as read; never raises."""
        known = document or {}
        files = known.get(FILES)
        named = files.get("gradients.pt") if isinstance(files, Mapping) else None
        record = named if isinstance(named, Mapping) else {}
        run = known.get("run")
        return cls(
            _whole(known.get("outer_step")),
            _whole(known.get("inner_step")),
            run if isinstance(run, (str, int)) else None,
            FileRecord(
                _whole(record.get("size_bytes")),
                checksum if isinstance(checksum := record.get("checksum"), str) else None,
            ),
        )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def reduced(metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The scalar fields of metadata.json, small enough to fit in a decision."""
    if metadata is None:
        return None
    scalars = {
        str(k)[:40]: v for k, v in metadata.items() if isinstance(v, (str, int, float)) or v is None
    }
    return {k: v[:80] if isinstance(v, str) else v for k, v in list(scalars.items())[:12]}


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


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block if a field that validators read is missing, or the inner step is unreadable.

    Warn if the steps differ from the candidate's: validators take the outer step from the network,
    and upstream writes the inner step at which the upload ended.
    """
    seen, needed = facts.candidate.metadata, list(limits.metadata_fields)
    if seen is None:
        return Verdict(RULE, "unknown", None, needed, "the caller did not pass metadata.json")
    if missing := [name for name in needed if name not in seen]:
        words = (
            f"metadata.json lacks {', '.join(missing)}, so validators read inner step 0 "
            "and reset scores"
        )
        return Verdict(
            RULE, "block", sorted(map(str, seen)), needed, f"{words}; add the missing fields"
        )
    inner = read_inner_step(seen)
    if inner is None and "inner_step" in needed:
        value = _short(seen["inner_step"])
        words = f"metadata.json: inner_step is {value}, not a step number; write an integer"
        return Verdict(RULE, "block", value, "a step", words)
    for name, ours in (
        ("outer_step", facts.candidate.outer_step),
        ("inner_step", facts.candidate.inner_step),
    ):
        theirs: Any = inner if name == "inner_step" else seen.get(name)
        if name in seen and theirs != ours:
            named = _short(theirs)
            what = name.replace("_", " ")
            words = f"metadata.json names {what} {named}, but the gradient is from {ours}"
            return Verdict(RULE, "warn", named, ours, words)
    words = f"metadata.json has {', '.join(needed) or 'none of the required fields'}"
    return Verdict(RULE, "pass", sorted(seen), needed, words)


def judge_published(facts: Facts, limits: Limits) -> Verdict:
    """`judge`, plus a warning if the published gradients are not the ones that the
    metadata describes."""
    verdict, published, metadata = judge(facts, limits), facts.published, facts.candidate.metadata
    # In the first half after an AllReduce, validators score the previous epoch, which the root
    # metadata does not describe.
    if (
        verdict.outcome != "pass"
        or metadata is None
        or RootMetadata.of(metadata).outer_step != published.outer_step
    ):
        return verdict
    why = mixed(metadata, published.size_bytes, published.checksum)
    if why is None:
        return verdict
    words = f"{why}: an upload is in progress or was interrupted. If this persists, publish again"
    return Verdict(RULE, "warn", published.checksum, None, words)


def mixed(
    metadata: Mapping[str, Any] | None, size_bytes: int | None, checksum: str | None
) -> str | None:
    """Return why gradients of this size and checksum do not belong to the revision that `metadata`
    describes; None without evidence.

    Checksums of different formats (an md5, a digest of parts' digests, a sha256) are not
    comparable.
    """
    named = RootMetadata.of(metadata).gradients
    if None not in (size_bytes, named.size_bytes) and named.size_bytes != size_bytes:
        return (
            f"gradients.pt is {size_bytes} bytes, but metadata.json describes a file of "
            f"{named.size_bytes}"
        )
    other = named.checksum
    if checksum is None or other is None or _form(checksum) != _form(other) or checksum == other:
        return None
    return f"gradients.pt has checksum {checksum[:12]}, but metadata.json describes {other[:12]}"


def _short(value: Any) -> str:
    return repr(value)[:40]


def _form(checksum: str) -> tuple[int, bool]:
    digest, dash, _ = checksum.partition("-")
    return len(digest), bool(dash)
