"""Controls the terminal for `top`: full screen, keys, resizing, colour. Always restores it on
exit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TextIO

from miner_guard.system.readiness import ready

_KEYS = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"k": "up",
    b"j": "down",
    b" ": "pause",
    b"p": "pause",
    b"s": "sort",
    b"?": "help",
    b"h": "help",
    b"q": "quit",
    b"Q": "quit",
}
_ONE_KEY = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)

_RED, _YELLOW, _GREEN, _BOLD, _OFF = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
_HEADLINES = (
    ("NOT EARNING", _RED),
    ("STOPPED", _RED),
    ("STILL EARNING, degraded", _YELLOW),
    ("PROBABLY STILL EARNING, degraded", _YELLOW),
    ("EARNING UNKNOWN, degraded", _YELLOW),
    ("DEGRADED", _YELLOW),
    ("UNKNOWN", _YELLOW),
    ("EARNING", _GREEN),
)
_WEEK = re.compile(r"^(week   )(\S+)(.*)$")
_CELLS = {"█": _GREEN, "#": _GREEN, "▅": _YELLOW, "+": _YELLOW, "?": _YELLOW}
_CELLS |= dict.fromkeys("▁!x", _RED)
_WORDS = (
    (re.compile(r"^(\d\d:\d\d:\d\d )(critical|error)( .*)$"), _RED),
    (re.compile(r"^(\d\d:\d\d:\d\d )(warning)( .*)$"), _YELLOW),
    (re.compile(r"^(gate   )(BLOCKED)(.*)$"), _RED),
    (re.compile(r"^(repo   .*)(\(STALE\))(.*)$"), _RED),
    (re.compile(r"^(loss   )(NaN|Infinity|-Infinity)(.*)$"), _RED),
)


def is_dumb() -> bool:
    """Return True if standard output cannot move its cursor: a pipe, a file, or TERM=dumb."""
    return not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb")


def has_unicode() -> bool:
    """Return True if standard output can show Unicode bars."""
    return "utf" in (sys.stdout.encoding or "").lower()


def has_colour() -> bool:
    """Return True if colour is allowed: not in a pipe, not on a dumb terminal, and not if NO_COLOR
    is set (no-color.org)."""
    return not is_dumb() and not os.environ.get("NO_COLOR")


def coloured(line: str) -> str:
    """Colour the words of a line that need attention. The line stays as wide as it was."""
    for words, colour in _HEADLINES:
        if line.startswith(words):
            return f"{_BOLD}{colour}{words}{_OFF}{line[len(words) :]}"
    if match := _WEEK.match(line):
        cells = (f"{_CELLS[cell]}{cell}{_OFF}" if cell in _CELLS else cell for cell in match[2])
        return f"{match[1]}{''.join(cells)}{match[3]}"
    for pattern, colour in _WORDS:
        if match := pattern.match(line):
            before, word, after = match.groups()
            return f"{before}{colour}{word}{_OFF}{after}"
    return line


class Terminal:
    """A full screen that repaints only changed lines and reads keys. Use as a context manager."""

    def __init__(self) -> None:
        self._painted: list[str] = []
        self._keys: list[object] | None = None
        self._woken, self._wake = os.pipe()
        self._before: object = None

    def __enter__(self) -> Terminal:
        if sys.stdin.isatty():
            self._keys = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        os.set_blocking(self._wake, False)
        self._before = signal.signal(signal.SIGWINCH, self._resized)
        sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGWINCH, signal.SIG_DFL if self._before is None else self._before)  # type: ignore[arg-type]
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if self._keys is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._keys)  # type: ignore[arg-type]
        os.close(self._woken)
        os.close(self._wake)

    def _resized(self, _signal: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"r")

    def size(self) -> tuple[int, int]:
        """Columns and lines, at least 40 and 10."""
        return size()

    def keys_within(self, seconds: float) -> Iterator[str]:
        """The names of the keys pressed within `seconds`; `resize` if the window has changed,
        `quit` at the end of standard input."""
        watched: list[int | TextIO] = [self._woken]
        if sys.stdin.isatty():
            watched.append(sys.stdin)
        readable, _ = ready(watched, seconds)
        if self._woken in readable:
            os.read(self._woken, 64)
            self._painted = []
            yield "resize"
        if sys.stdin in readable:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed:
                yield "quit"
            for key in _ONE_KEY.findall(pressed):
                yield _KEYS.get(key, "")

    def paint(self, lines: Sequence[str], *, colour: bool) -> None:
        """Send only changed lines, so that a refresh over a slow SSH connection takes only a few
        dozen bytes."""
        whole = len(lines) != len(self._painted)
        changed = [
            f"\x1b[{row};1H{coloured(line) if colour else line}\x1b[K"
            for row, line in enumerate(lines, 1)
            if whole or line != self._painted[row - 1]
        ]
        self._painted = list(lines)
        sys.stdout.write(("\x1b[2J" if whole else "") + "".join(changed))
        sys.stdout.flush()


def size() -> tuple[int, int]:
    """Columns and lines of standard output, at least 40 and 10; 80 and 24 if it is not a
    terminal."""
    try:
        given = os.get_terminal_size(sys.stdout.fileno())
        return max(40, given.columns or 80), max(10, given.lines or 24)
    except OSError:
        return 80, 24
