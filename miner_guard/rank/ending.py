"""Detects, from inside a rank, how its process ends, because the launcher does not pass on the
ranks' exit codes."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable


def follow(forked: Callable[[], None], exited: Callable[[bool], None]) -> None:
    """Call `forked` in each forked child of this process, and `exited(failed)` as `at_exit` does.
    Both are methods; neither is called once its object no longer exists."""
    weak_forked, weak_exited = weakref.WeakMethod(forked), weakref.WeakMethod(exited)

    def after_in_child() -> None:
        if (own := weak_forked()) is not None:
            own()

    def ended(failed: bool) -> None:
        if (own := weak_exited()) is not None:
            own(failed)

    os.register_at_fork(after_in_child=after_in_child)
    at_exit(ended)


def at_exit(ended: Callable[[bool], None]) -> None:
    """Call `ended(failed)` when this process exits through the interpreter, but not after
    `os._exit` or a signal.

    `failed`: whether an exception ended the process. The code of a `sys.exit` counts only in a
    multiprocessing child; elsewhere it is unknown here.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing import util

        # A multiprocessing child ends with os._exit, but runs its own finalizers first, while
        # `sys.exc_info` still holds the exception.
        util.Finalize(None, lambda: ended(_failing(sys.exc_info()[1])), exitpriority=0)
    else:
        atexit.register(lambda: ended(_uncaught()))


def _failing(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def _uncaught() -> bool:
    """Return whether the interpreter has reported an exception that reached the top level."""
    return hasattr(sys, "last_exc") or hasattr(sys, "last_value")
