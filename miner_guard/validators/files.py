"""The files of a repo as validators read them: their keys, which a profile's `[limits]` name, and
metadata.json, the root document that validators start from. Pure."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miner_guard.validators.limits import Limits


@dataclass(frozen=True)
class Layout:
    """Keys with fields such as `{outer_step}`; None for a document that the network does not
    have."""

    gradients: str
    config: str | None = None
    metadata: str | None = None

    @classmethod
    def of(cls, limits: Limits) -> Layout:
        """The profile's layout. If it names no key for the gradients, its other keys replace those
        of `USUAL`; if it does, any document that it names no key for does not exist on that
        network."""
        if limits.gradients_key is None:
            config, metadata = limits.config_key, limits.metadata_key
            return cls(USUAL.gradients, config or USUAL.config, metadata or USUAL.metadata)
        return cls(limits.gradients_key, limits.config_key, limits.metadata_key)

    @property
    def file(self) -> str:
        """The name of the gradients file, for messages."""
        return self.gradients.rpartition("/")[2]

    @property
    def prefix(self) -> str:
        """The prefix shared by the keys of all gradients files."""
        return self.gradients.partition("{")[0]

    def outer_step_of(self, key: str) -> int | None:
        """The outer step in a gradients file's key; None for another file's key, or one without a
        step."""
        match = re.fullmatch(_expression(self.gradients), key)
        step = None if match is None else match.groupdict().get("outer_step")
        return int(step) if step is not None and step.isdecimal() else None

    def gradients_of(self, outer_step: int) -> str | None:
        """Key of `outer_step`'s gradients; None if the key has fields besides the step."""
        return _of_step(self.gradients, outer_step)

    def config_of(self, outer_step: int) -> str | None:
        """Key of `outer_step`'s config; None if the layout has no config, or if its key has
        fields besides the step."""
        return None if self.config is None else _of_step(self.config, outer_step)


USUAL = Layout("epoch-{outer_step}/gradients.pt", "epoch-{outer_step}/config.json", "metadata.json")
"""The layout of subnet 38, which the demo writes and which probes expect unless a profile says
otherwise."""


def filled(key: str | None, names: Mapping[str, Any]) -> str | None:
    """The key with its fields replaced. Raises KeyError for a field that `names` lacks."""
    return None if key is None else key.format(**names)


def _of_step(key: str, outer_step: int) -> str | None:
    try:
        return key.format(outer_step=outer_step)
    except KeyError:
        return None


def _expression(key: str) -> str:
    parts = string.Formatter().parse(key)
    return "".join(
        re.escape(text) + ("" if name is None else f"(?P<{name}>[^/]+?)")
        for text, name, _, _ in parts
    )


# metadata.json

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
        fields = document or {}
        files = fields.get(FILES)
        named = files.get("gradients.pt") if isinstance(files, Mapping) else None
        record = named if isinstance(named, Mapping) else {}
        run = fields.get("run")
        return cls(
            _whole(fields.get("outer_step")),
            _whole(fields.get("inner_step")),
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
