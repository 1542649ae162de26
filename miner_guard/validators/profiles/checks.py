"""Finds what is wrong with a profile's limits, hardware, patterns and sources; each message names
the key, the value seen and what is allowed."""

from __future__ import annotations

import difflib
import re
import string
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.record.phases import PHASES
from miner_guard.validators.limits import FROM_GATE, NAMES, Limits

_STEP = "step outer inner loss lr grad_norm seconds ms gpu_gb micro total rank"
_GROUPS: Mapping[str, Sequence[str]] = {
    "step": _STEP.split(),
    "push": ["tag"],
    "push_failed": ["reason"],
    "phase": ["seconds", "outer", *PHASES, "checkpoint"],
    "peers": ["peers"],
    "allreduce_finished": [],
    "allreduce_failed": ["reason"],
}
"""The named groups that are read, for each list under `[patterns]`;
miner_guard/watch/patterns.toml explains them. In `phase`, a name that does not resemble any of
these is one of the miner's own phases."""

PATTERNS = tuple(_GROUPS)
"""Lists of regular expressions under `[patterns]`."""

_KEY_FIELDS = ("outer_step", "uid")
_FIELDS: Mapping[str, Sequence[str]] = {
    "gradients_key": _KEY_FIELDS,
    "config_key": _KEY_FIELDS,
    "metadata_key": (),
    "endpoint": ("account",),
}
"""For each limit, the fields in braces that get filled in."""

_LIMIT_GROUPS = {"revision_pattern": ("run", "outer", "inner"), "bucket_pattern": ("model", "uid")}
"""The named groups that the rules read, for each limit that is a regular expression."""

COMPUTE = (
    "min_gpus",
    "gpus_per_rank",
    "min_gpu_memory_gb",
    "min_vcpus",
    "min_memory_gb",
    "min_disk_gb",
)
"""Keys of `[compute]`, the hardware that a subnet requires."""

_NEEDED = {"step": {"step", "inner"}, "peers": {"peers"}}
"""For each list of expressions, the named groups; every expression needs at least one of them."""

_ALIKE = 0.8
"""How similar a phase's name must be to a known one to count as mistyped (difflib's ratio)."""

_MAX_PHASE_BYTES = 24
"""Maximum length of a phase's name in a flight record."""


def wrong_limits(limits: Mapping[str, Any]) -> Iterator[str]:
    """Report limits that no rule reads, and values whose type the rules do not accept."""
    hints = typing.get_type_hints(Limits)
    kinds = {name: hints[name] for name in hints if name in NAMES}
    for name, value in limits.items():
        if name in FROM_GATE:
            yield f"[limits] {name}: this is a guard setting; put it in [settings.gate]"
        elif name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; rules know {', '.join(kinds)}"
            yield f"[limits] {name}: no rule knows this limit{hint}"
        elif not _fits(value, kinds[name]):
            expected = _type_name(kinds[name])
            yield f"[limits] {name} is {value!r}; the rules require {expected}"
        else:
            yield from (f"[limits] {name}: {value!r} {why}" for why in _wrong_text(name, value))
    try:
        Limits.of(GateSettings(), limits)
    except TypeError as error:
        yield f"[limits] {error}"


def _wrong_text(name: str, value: Any) -> Iterator[str]:
    """Report key fields that nothing fills in, and expression groups that nothing reads."""
    if name in _FIELDS:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(value)]
        except ValueError as error:
            yield f"is not a valid key: {error}"
            return
        yield from _unknown("the field", [f for f in fields if f is not None], _FIELDS[name])
    elif name in _LIMIT_GROUPS:
        try:
            yield from _unknown("the group", re.compile(value).groupindex, _LIMIT_GROUPS[name])
        except re.error as error:
            yield f"is not a valid regular expression: {error}"


def _unknown(what: str, names: Collection[str], allowed: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in allowed:
            meant = "".join(
                f"did you mean {n}? " for n in difflib.get_close_matches(name, allowed, 1)
            )
            yield f"has {what} {name!r}; {meant}allowed: {', '.join(allowed) or 'none'}"


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a TOML value has a limit's type; None stands for an absent limit."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if typing.get_origin(kind) is tuple:
        repeated = len(parts) == 2 and parts[1] is Ellipsis
        if not isinstance(value, list) or not (repeated or len(value) == len(parts)):
            return False
        expected = [parts[0]] * len(value) if repeated else parts
        return all(_fits(v, p) for v, p in zip(value, expected, strict=True))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _type_name(kind: Any) -> str:
    """The type as people write it: `int`, `float`, `[float, float]`, `[str, …]`."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is tuple:
        return f"[{', '.join('…' if p is Ellipsis else _type_name(p) for p in parts)}]"
    return " or ".join(map(_type_name, parts)) if parts else kind.__name__


def wrong_compute(compute: Mapping[str, Any]) -> Iterator[str]:
    """Report minimums that no check uses, and values that are not numbers."""
    for name, value in compute.items():
        if name not in COMPUTE:
            yield f"[compute] {name}: unknown; allowed: {', '.join(COMPUTE)}"
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            yield f"[compute] {name} is {value!r}; write a number"


def wrong_patterns(patterns: Mapping[str, Any]) -> Iterator[str]:
    """Report unknown lists, and expressions that do not compile or lack a group."""
    for kind, texts in patterns.items():
        if kind not in PATTERNS:
            yield f"[patterns] {kind}: unknown; allowed: {', '.join(PATTERNS)}"
        elif not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            yield f"[patterns] {kind} is {texts!r}; write a list of regular expressions"
        else:
            for text in texts:
                yield from (f"[patterns] {kind}: {text!r} {why}" for why in defects(kind, text))


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
        # A miner may have phases of its own, unless their name has a meaning in another list.
        taken = {name for names in _GROUPS.values() for name in names}
        close = difflib.get_close_matches
        groups = [n for n in groups if n in taken or close(n, _GROUPS[kind], 1, _ALIKE)]
    yield from _unknown("the group", groups, _GROUPS[kind])


def wrong_sources(sources: Mapping[str, Any], profile: Mapping[str, Any]) -> Iterator[str]:
    """Report sources given for values that the profile lacks, and sources that are not text."""
    tables = {"limits": profile.get("limits", {}), "compute": profile.get("compute", {})}
    for section, table in profile.get("settings", {}).items():
        tables[f"settings.{section}"] = table if isinstance(table, Mapping) else {}
    values = [f"{table}.{key}" for table, keys in tables.items() for key in keys]
    for name, source in sources.items():
        if not isinstance(source, str):
            yield f"[sources] {name} is {source!r}; it must be a string; put quotes around the name"
        elif name not in values:
            near = difflib.get_close_matches(name, values, 1)
            hint = f"did you mean {near[0]}?" if near else f"its values: {', '.join(values)}"
            yield f"[sources] {name} = {source!r}: the profile has no such value; {hint}"
