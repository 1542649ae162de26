"""Asks the kernel to send this process a signal when its parent dies.

This is a separate module because ctypes costs memory and only some processes need it.
"""

from __future__ import annotations

import ctypes

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def signal_at_parents_death(number: int) -> None:
    """Make the kernel send signal `number` to this process when the thread that forked it ends.
    Safe between fork and exec; survives exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
