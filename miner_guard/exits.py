"""The exit codes of every command, and the exception that carries one with its reason."""

from __future__ import annotations

OK = 0
FAILED = 1
"""Nothing matched, blocked, rejected, over budget; what it means stands with each command."""

NOT_RUNNING = 3
USAGE = 64
UNAVAILABLE = 69
"""Preflight critical; could not look."""

CRASH_LOOP = 75
"""Restarting does not help, or `[hang] action = "stop"` after a hang."""

CONFIG = 78


class Refused(Exception):
    """A command can't be done. The message is for people: what happened, the value seen, what to
    do."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
