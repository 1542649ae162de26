"""Ends the guard's own helpers that outlived the shutdown of their owners."""

from __future__ import annotations

import os
import signal
import time

from miner_guard.system import processes


def end_helpers(within_s: float) -> None:
    """Kill the helpers that are left; returns when they are gone or after `within_s` seconds.

    Each monitor, probe and sender ends its own. But a thread may have been about to start one while
    its owner stopped, and nothing else would end that one before the guard exits. Processes of the
    miner are never touched.
    """
    own_command = processes.command(os.getpid())
    deadline = time.monotonic() + within_s
    while _any_after_killing(own_command) and time.monotonic() < deadline:
        time.sleep(0.01)


def _any_after_killing(own_command: str) -> bool:
    """Whether a helper lived, or may become one: between fork and exec it is a copy of the
    guard."""
    found = False
    for pid in processes.children():
        seen = processes.stat(pid)
        if seen is None or not seen.lives:
            continue
        helper = processes.is_helper(pid, own_command)
        if helper:
            processes.send(seen.process, signal.SIGKILL)
        found |= helper is not False
    return found
