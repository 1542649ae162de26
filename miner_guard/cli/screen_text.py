"""Text for the screens of `top` and `status`: curves, bars, durations, lines that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from miner_guard.record.words import visible

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"
_INDENT = " " * 7
"""Indents the continuation lines of a line that wraps."""


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Draw the last `width` values as bars scaled between their minimum and maximum."""
    shown = [value for value in list(values)[-width:] if value - value == 0]
    if not shown:
        return ""
    bars = _ASCII_BARS if ascii_only else _BARS
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(
        bars[min(len(bars) - 1, int(len(bars) * (value - low) / span))] for value in shown
    )


def progress_bar(done: float, whole: float, width: int, *, ascii_only: bool = False) -> str:
    """Draw `done` out of `whole` as a bar of `width` columns."""
    filled = 0 if whole <= 0 else max(0, min(width, round(width * done / whole)))
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)


def duration(seconds: Any) -> str:
    """Format seconds as `45s`, `12m`, `3.1h` or `2.0d`; `?` if unknown."""
    if not isinstance(seconds, (int, float)):
        return "?"
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h" if seconds < 172800 else f"{seconds / 86400:.1f}d"


def cut(line: str, width: int, *, ascii_only: bool = False) -> str:
    """Truncate the line to `width` and mark where text was cut."""
    more = "..." if ascii_only else "…"
    line = visible(line).replace("\n", " ")
    return line if len(line) <= width else line[: width - len(more)] + more


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line to `width`. The first lines of the screen matter most, so all of their words must
    stay visible."""
    return textwrap.wrap(
        visible(line).replace("\n", " "),
        max(width, 2 * len(_INDENT)),
        subsequent_indent=_INDENT,
        drop_whitespace=True,
        break_on_hyphens=False,
    )
