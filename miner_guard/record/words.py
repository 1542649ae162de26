"""Puts measured values into words: counts, shares, sizes and lists of ranks. Standard library
only."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

_TINY_SHARE = 0.01


def or_unknown(value: Any, spec: str = "", unit: str = "", *, unknown: str = "unknown") -> str:
    """Format `value` with `spec` and its unit. A string stays unchanged, None becomes `unknown`,
    and NaN becomes `NaN`, as in the log."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return unknown if value is None else f"{value:{spec}}{unit}"


def number(value: Any, spec: str = "", unit: str = "") -> str:
    """`or_unknown` for lines where space is short: None becomes `?`."""
    return or_unknown(value, spec, unit, unknown="?")


def counted(count: int | None, noun: str) -> str:
    """Format a count with its noun: `1 line`, `2 lines`, `unknown lines`."""
    return f"{'unknown' if count is None else count} {noun}{'' if count == 1 else 's'}"


def percentages(shares: Mapping[str, float]) -> dict[str, str]:
    """Format shares of a whole (0-1) as percentages, largest first. The percentages are whole
    numbers that sum to 100, or to at most 99 if a share below 1 % is shown as `<1%`."""
    ordered = sorted((name for name in shares if shares[name] > 0), key=lambda name: -shares[name])
    exact = {name: 100 * shares[name] for name in ordered if shares[name] >= _TINY_SHARE}
    whole = {name: int(percent) for name, percent in exact.items()}
    missing = round(100 * sum(shares.values())) - sum(whole.values()) - (len(exact) < len(ordered))
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[: max(0, missing)]:
        whole[name] += 1
    return {name: f"{whole[name]}%" if name in whole else "<1%" for name in ordered}


def gb(size_bytes: float | None) -> float | None:
    """Convert bytes to GiB, which torch and the source documents call GB."""
    return None if size_bytes is None else size_bytes / 1024**3


def rank_list(ranks: Iterable[int]) -> str:
    """Format ranks as `rank 2`, `ranks 0,1,3` or `ranks 0-6,9`: three or more consecutive ranks
    become a range."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    while numbers:
        count = 1
        while count < len(numbers) and numbers[count] == numbers[0] + count:
            count += 1
        row, numbers = numbers[:count], numbers[count:]
        parts += [f"{row[0]}-{row[-1]}"] if count > 2 else [str(number) for number in row]
    return f"rank{'' if len(parts) == 1 and '-' not in parts[0] else 's'} {','.join(parts)}"


def shortened(text: str, limit: int) -> str:
    """`text` in at most `limit` characters: its first whole sentences, or if they are less than
    half of that, its first words and `…`."""
    if len(text) <= limit:
        return text
    sentence = text.rfind(". ", limit // 2, limit)
    if sentence >= 0:
        return text[:sentence]
    word = text.rfind(" ", limit // 2, limit)
    return f"{text[: word if word >= 0 else limit - 1].rstrip(' ,;:(')}…"


_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # reorder the characters around them
    r"\u2028\u2029"  # break lines
    r"\ud800-\udfff]"  # stand for bytes that are not UTF-8, and can't be written as UTF-8
)


def visible(text: str) -> str:
    """Replace control characters except tab and newline with escapes such as `\\x1b` or `\\u202e`.
    JSON stays valid JSON.

    A log may contain sequences that control a terminal or reorder the text on it. A command or a
    path may contain bytes that are not UTF-8, which would make a line invalid JSON.
    """
    return _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


IN_SHUTDOWN, GONE = "in shutdown", "is gone"
"""Where a hang says that a rank is which has ended, or whose process has."""


def raised_at(error: Exception) -> str:
    """Where an error was raised, as `file:line`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.filename}:{place.lineno}"


def defect(error: Exception) -> str:
    """A bug of the guard in words: type, message and place of its exception."""
    return f"{type(error).__name__}: {error} ({raised_at(error)})"
