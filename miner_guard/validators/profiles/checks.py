"""What a profile may hold, as pydantic models. Each message names the key, the value seen and what
is allowed.

Only for profiles that the operator wrote: the tests check the shipped ones, and importing pydantic
would cost every start of a guard.
"""

from __future__ import annotations

import datetime
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, create_model

from miner_guard.record.events import PHASES
from miner_guard.validators.limits import FROM_GATE, NAMES, Limits

GROUPS: Mapping[str, Sequence[str]] = {
    "step": [
        *("step", "outer", "inner", "loss", "lr", "grad_norm"),
        *("seconds", "ms", "gpu_gb", "micro", "total", "rank"),
    ],
    "push": ["tag"],
    "push_failed": ["reason"],
    "sent": [],
    "dropped": [],
    "phase": ["seconds", "outer", "position", *PHASES, "checkpoint"],
}
"""The named groups that are read, for each list of regular expressions under `[patterns]`;
miner_guard/watch/patterns.toml explains them. In `phase`, any other name is one of the miner's own
phases."""

_NEEDED = {"step": {"step", "inner"}}
"""For each list of expressions, the named groups; every expression needs at least one of them."""

_MAX_PHASE_BYTES = 24
"""Maximum length of a phase's name in a flight record."""


def defects(kind: str, text: str) -> Iterator[str]:
    """Report what is wrong with an expression in the list `kind`."""
    try:
        groups = list(re.compile(text).groupindex)
    except re.error as error:
        yield f"is not a valid regular expression: {error}"
        return
    needed = _NEEDED.get(kind)
    if needed and not needed & set(groups):
        yield f"names no group {' or '.join(sorted(needed, reverse=True))}"
    if kind == "phase":
        for name in groups:
            if len(name.encode()) > _MAX_PHASE_BYTES:
                yield f"names a phase of more than {_MAX_PHASE_BYTES} bytes: {name}"
        return
    for name in groups:
        if name not in GROUPS[kind]:
            yield f"has the group {name!r}; allowed: {', '.join(GROUPS[kind]) or 'none'}"


def _checked(defects_of: Callable[[str], Iterator[str]]) -> AfterValidator:
    def check(value: str | None) -> str | None:
        for why in () if value is None else defects_of(value):
            raise ValueError(why)
        return value

    return AfterValidator(check)


def _key(**fields: Any) -> AfterValidator:
    """A text that can be filled with `fields`."""

    def defects_of(text: str) -> Iterator[str]:
        try:
            text.format(**fields)
        except (KeyError, ValueError, IndexError) as error:
            allowed = ", ".join(f"{{{name}}}" for name in fields) or "no braces"
            yield f"is not valid ({type(error).__name__}: {error}); allowed: {allowed}"

    return _checked(defects_of)


_TEXTS = {"endpoint": _key(account="a"), "bucket": _key(uid=1)}
_STRICT = ConfigDict(extra="forbid", strict=True)


def _table(name: str, kinds: Mapping[str, Any]) -> type[BaseModel]:
    fields: dict[str, Any] = {key: (kind, None) for key, kind in kinds.items()}
    return create_model(name, __config__=_STRICT, **fields)


_HINTS = typing.get_type_hints(Limits)
LIMITS = _table(
    "limits", {n: Annotated[_HINTS[n], _TEXTS[n]] if n in _TEXTS else _HINTS[n] for n in NAMES}
)
_COMPUTE = "min_gpus gpus_per_rank min_gpu_memory_gb min_vcpus min_memory_gb min_disk_gb"
COMPUTE = _table("compute", dict.fromkeys(_COMPUTE.split(), float))


def _patterns_of(kind: str) -> Any:
    return list[Annotated[str, _checked(lambda text: defects(kind, text))]]


_PATTERNS = _table("patterns", {kind: _patterns_of(kind) for kind in GROUPS})


class ProfileModel(BaseModel):
    """A profile's TOML document."""

    model_config = _STRICT

    name: str
    title: str
    read_from: str
    dated: datetime.date
    status: Literal["alive", "dormant", "ended"] = "alive"
    status_as_of: datetime.date | None = None
    status_source: str | None = None
    compute: COMPUTE = {}  # type: ignore[valid-type]
    settings: dict[str, Any] = {}
    advice: dict[str, str] = {}
    limits: LIMITS = {}  # type: ignore[valid-type]
    patterns: _PATTERNS = {}  # type: ignore[valid-type]
    sources: dict[str, str] = {}


def wrong(document: Mapping[str, Any]) -> Iterator[str]:
    """Report what is wrong with a profile's document."""
    limits = document.get("limits")
    for name in FROM_GATE:
        if isinstance(limits, Mapping) and name in limits:
            yield f"[limits] {name}: this is a guard setting; put it in [settings.gate]"
    try:
        # As JSON, so that strict types take TOML's lists for tuples.
        ProfileModel.model_validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        for defect in error.errors():
            yield _worded(defect)


def _worded(defect: Mapping[str, Any]) -> str:
    path = [str(part) for part in defect["loc"]]
    table = f"[{path[0]}] " if len(path) > 1 else ""
    key = path[min(len(path) - 1, 1)]
    if defect["type"] == "extra_forbidden":
        tables = {"limits": LIMITS, "compute": COMPUTE, "patterns": _PATTERNS}
        allowed = tables.get(path[0] if table else "", ProfileModel).model_fields
        return f"{table}{key}: unknown; allowed: {', '.join(sorted(allowed))}"
    if defect["type"] == "missing":
        return f"lacks {key}"
    words = defect["msg"].removeprefix("Value error, ")
    if defect["type"] == "value_error":
        return f"{table}{key}: {defect['input']!r} {words}"
    return f"{table}{key} is {defect['input']!r}: {words[:1].lower()}{words[1:]}"
