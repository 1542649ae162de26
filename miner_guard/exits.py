"""The exit codes of all commands, and the exception that carries an exit code and its reason."""

from __future__ import annotations

OK = 0
FAILED = 1
"""A negative result: no match, upload blocked, repo rejected or over budget. Each command documents
its own."""

NOT_RUNNING = 3
USAGE = 64
UNAVAILABLE = 69
"""The preflight found a critical problem, or a check could not run."""

CRASH_LOOP = 75
"""Restarts do not help, or the miner is hung and `[hang] action` is "stop"."""

CONFIG = 78


class Refused(Exception):
    """A command cannot be carried out. The message tells the operator what happened, the value seen
    and what to do."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
