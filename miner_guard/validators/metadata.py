"""metadata.json: the root document that validators start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FILES = "files"
"""The key in metadata.json that maps each file's name to its `FileRecord`. A miner may
write it; validators ignore it."""


@dataclass(frozen=True)
class FileRecord:
    """A published file, as described by the metadata published with it."""

    size_bytes: int | None = None
    checksum: str | None = None


@dataclass(frozen=True)
class RootMetadata:
    """The fields of metadata.json that probes and audit read; None for one that is
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


def _form(checksum: str) -> tuple[int, bool]:
    digest, dash, _ = checksum.partition("-")
    return len(digest), bool(dash)
