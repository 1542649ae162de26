"""gate-inputs.json: tells the gate inside rank 0 about the outside world.

Standard library only. The supervisor replaces the file atomically; the gate reads it. If the
file is unreadable or invalid, its content counts as unknown, with the reason; the gate never fails
because of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.state_dir import finite, read_regular, write_atomic
from miner_guard.validators.facts import Network, Published

_Known = TypeVar("_Known", Published, Network)


@dataclass(frozen=True)
class GateInputs:
    """The file's content; everything is unknown if the file does not exist."""

    published: Published = field(default_factory=Published)
    network: Network = field(default_factory=Network)
    bucket: str | None = None
    credentials: str | None = None
    """Fingerprint of the commitment that the credentials in use would produce."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    """The profile's `[limits]`, which the rules read."""

    written: float | None = None
    """Wall time, for display."""

    written_monotonic: float | None = None
    reason: str | None = None
    """Why the content is unknown; None if the file was read completely."""

    text_digest: str = field(default="", compare=False, repr=False)
    """`digest`, if already computed from the file's text."""

    def aged(self, now: float, max_age_s: float) -> GateInputs:
        """Mark the repo and the network as unknown if, at `now` (monotonic), the file is older than
        `max_age_s`."""
        if self.reason is not None or self.written_monotonic is None:
            return self
        age = now - self.written_monotonic
        if 0 <= age <= max_age_s:
            return self
        if age < 0:
            reason = "gate-inputs.json was written before this host's last boot"
        else:
            reason = (
                f"gate-inputs.json is {age:.0f}s old (limit {max_age_s:.0f}s): is the guard "
                "running?"
            )
        return replace(
            self, published=Published(reason=reason), network=Network(reason=reason), reason=reason
        )

    @property
    def digest(self) -> str:
        """Identifies this content in the ledger: 16 hex digits."""
        return self.text_digest or _digest_of(canonical(as_document(self)))


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical(document: Any) -> str:
    """Canonical JSON: sorted keys, no spaces."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)


def as_document(inputs: GateInputs) -> dict[str, Any]:
    """The file's JSON document; non-finite numbers become null."""
    document: dict[str, Any] = finite(asdict(inputs))
    del document["text_digest"]
    return document


def write(path: Path, inputs: GateInputs) -> None:
    """Replace the file. Raises OSError."""
    write_atomic(path, canonical(as_document(inputs)) + "\n")


def read(path: Path) -> GateInputs:
    """The file's content; `reason` says what is wrong with it. Never raises.

    Does not reread an unchanged file: training asks the gate at every step.
    """
    global _last_read
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return unknown("gate-inputs.json does not exist: no guard has written it")
    except OSError as error:
        return unknown(f"gate-inputs.json cannot be read: {error}")
    version = (str(path), found.st_ino, found.st_mtime_ns, found.st_size)
    # Read the tuple once and assign it once, so that other threads never see a mixed pair.
    last = _last_read
    if last is not None and last[0] == version:
        return last[1]
    inputs = _read_now(path)
    _last_read = (version, inputs)
    return inputs


_last_read: tuple[tuple[str, int, int, int], GateInputs] | None = None


def _read_now(path: Path) -> GateInputs:
    try:
        text = read_regular(path).decode("utf-8")
        document = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        return unknown(f"gate-inputs.json cannot be read: {error}")
    except (ValueError, RecursionError):
        return unknown("gate-inputs.json is torn or not JSON")
    inputs = from_document(document)
    return (
        inputs
        if inputs.reason is not None
        else replace(inputs, text_digest=_digest_of(text.rstrip("\n")))
    )


def unknown(reason: str) -> GateInputs:
    """Inputs with everything unknown."""
    return GateInputs(
        published=Published(reason=reason), network=Network(reason=reason), reason=reason
    )


def from_document(document: Any) -> GateInputs:
    """Inputs from a JSON document; a value of the wrong type makes all of it unknown. Never
    raises."""
    try:
        if not isinstance(document, Mapping):
            raise TypeError("not an object")
        limits = document.get("limits") or {}
        if not isinstance(limits, Mapping):
            raise TypeError("limits is not an object")
        return GateInputs(
            published=_facts(Published, document.get("published")),
            network=_facts(Network, document.get("network")),
            bucket=_typed(document.get("bucket"), (str,), "bucket"),
            credentials=_typed(document.get("credentials"), (str,), "credentials"),
            limits=dict(limits),
            written=_typed(document.get("written"), (int, float), "written"),
            written_monotonic=_typed(
                document.get("written_monotonic"), (int, float), "written_monotonic"
            ),
            reason=_typed(document.get("reason"), (str,), "reason"),
        )
    except TypeError as error:
        return unknown(f"gate-inputs.json was written by a different version: {error}")


def _facts(kind: type[_Known], table: Any) -> _Known:
    if table is None:
        return kind()
    if not isinstance(table, Mapping):
        raise TypeError(f"{kind.__name__} is not an object")
    allowed = _ALLOWED[kind.__name__]
    values: dict[str, Any] = {k: _typed(v, allowed[k], k) for k, v in table.items() if k in allowed}
    if values.get("empty") is None:
        values.pop("empty", None)
    return kind(**values)


def _classes(hint: Any) -> tuple[type, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(c for part in typing.get_args(hint) for c in _classes(part))
    kind = typing.get_origin(hint) or hint
    return (int, float) if kind is float else (kind,)


def _typed(value: Any, allowed: tuple[type, ...], name: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise TypeError(f"{name} is {type(value).__name__}")
    return value


def _fields_of(kind: Any) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(kind)
    return {f.name: _classes(hints[f.name]) for f in fields(kind)}


_ALLOWED: Mapping[str, dict[str, tuple[type, ...]]] = {
    kind.__name__: _fields_of(kind) for kind in (Published, Network)
}
