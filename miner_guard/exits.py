"""The exit codes of every command, and the exception that carries one with its reason."""

from __future__ import annotations

OK = 0
FAILED = 1
"""Nothing matched, blocked, rejected or over budget; each command documents which."""

NOT_RUNNING = 3
USAGE = 64
UNAVAILABLE = 69
"""Preflight critical, or a check could not run."""

CRASH_LOOP = 75
"""Restarting does not help, or a hang with `[hang] action = "stop"`."""

CONFIG = 78


class Refused(Exception):
    """A command cannot be carried out. The message is for people: what happened, the value seen,
    what to do."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
