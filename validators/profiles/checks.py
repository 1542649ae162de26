"""Finds what is wrong with a profile's limits, hardware and patterns; each message names the key
and what is allowed."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miner_guard.config import GateSettings
from validators.limits import FROM_GATE, NAMES, Limits

PATTERNS = (
    "step",
    "push",
    "push_failed",
    "phase",
    "peers",
    "allreduce_finished",
    "allreduce_failed",
)
"""Lists of regular expressions under `[patterns]`, as miner_guard/attach/patterns.toml explains
them."""

COMPUTE = (
    "min_gpus",
    "gpus_per_rank",
    "min_gpu_memory_gb",
    "min_vcpus",
    "min_memory_gb",
    "min_disk_gb",
)
"""Keys of `[compute]`, the hardware that a subnet demands."""

_GROUPS = {"step": ({"step", "inner"}, "step or inner"), "peers": ({"peers"}, "peers")}
"""Lists whose expressions need one of these named groups."""

_MAX_PHASE_BYTES = 24
"""Maximum length of a phase's name in a flight record."""


def wrong_limits(limits: Mapping[str, Any]) -> Iterator[str]:
    """Report limits that no rule reads, and values whose type the rules do not accept."""
    hints = typing.get_type_hints(Limits)
    kinds = {name: hints[name] for name in hints if name in NAMES}
    for name, value in limits.items():
        if name in FROM_GATE:
            yield f"[limits] {name}: this is a setting of the guard; write it in [settings.gate]"
        elif name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; rules know {', '.join(kinds)}"
            yield f"[limits] {name}: no rule knows this limit{hint}"
        elif not _fits(value, kinds[name]):
            expected = _type_name(kinds[name])
            yield f"[limits] {name} is {value!r}; the rules need {expected}"
    try:
        Limits.of(GateSettings(), limits)
    except TypeError as error:
        yield f"[limits] {error}"


def _fits(value: Any, kind: Any) -> bool:
    """Whether a TOML value is of a limit's type; None stands for an absent limit."""
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
    """Report minimums that no check compares, and values that are not numbers."""
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
            yield from (f"[patterns] {kind}: {text!r} {why}" for text, why in _defects(kind, texts))


def _defects(kind: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        try:
            groups = set(re.compile(text).groupindex)
        except re.error as error:
            yield text, f"is not a valid regular expression: {error}"
            continue
        needed, words = _GROUPS.get(kind, (groups, ""))
        if not needed & groups and words:
            yield text, f"names no group {words}"
        too_long = [name for name in groups if len(name.encode()) > _MAX_PHASE_BYTES]
        if kind == "phase" and too_long:
            yield text, f"names a phase of more than {_MAX_PHASE_BYTES} bytes: {too_long[0]}"
