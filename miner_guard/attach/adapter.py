"""Shared by all attach modes: one guard per process, phases around calls, and reports of code that
could not be hooked."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import miner_guard
from miner_guard.attach import ATTACHED
from miner_guard.rank.guard import Guard
from miner_guard.rank.recorder import describe
from miner_guard.record.events import Event, degraded


class Adapter:
    """Connects an unmodified program to the hook. Never raises into the program."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.guard: Guard | None = None
        self._pending: list[Event] = []
        # Two threads may begin to train at the same time.
        self._beginning = threading.Lock()

    def begin(self, *, agree: bool) -> None:
        """Create this process's guard. With `agree`, also set up the agreement that the gate needs,
        which is collective."""
        if self.guard is not None:
            return
        with self._beginning:
            if self.guard is None:
                self._begin(agree)

    def _begin(self, agree: bool) -> None:
        # From here on, child processes (upload workers, dataloaders) are not ranks.
        os.environ[ATTACHED] = str(os.getpid())
        self.guard = miner_guard.init(agree=agree)
        for event in self._pending:
            self.guard.emit(event)
        self._pending.clear()

    def emit(self, event: Event) -> None:
        """Log an event, or keep it until the guard exists."""
        if self.guard is not None:
            self.guard.emit(event)
            return
        if not self._pending:
            atexit.register(self._say_at_last)
        self._pending.append(event)

    def _say_at_last(self) -> None:
        """Print the pending events, because the process is exiting before it has a guard."""
        for event in self._pending:
            with contextlib.suppress(OSError):
                os.write(2, f"{event.text}\n".encode("utf-8", "replace"))

    def degraded(self, what: str) -> None:
        """Report that a part of the program can't be hooked and so runs unchanged."""
        self.emit(degraded(f"attach {self.way}: {what}"))

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.guard is None else self.guard.phase(name)

    def quiet(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return `work(*arguments)`; if it raises, report that and return None."""
        try:
            return work(*arguments)
        except Exception as error:  # noqa: BLE001 - the program must not notice; reported as guard_degraded
            self.degraded(f"{getattr(work, '__name__', work)}: {describe(error)}")
            return None


def around(
    function: Callable[..., Any], context: Callable[..., AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Wrap each call to `function` in `context(*args)`, with the call's positional arguments. A
    coroutine function gets a wrapper that is also a coroutine function."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with context(*args):
                return await function(*args, **kwargs)

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context(*args):
            return function(*args, **kwargs)

    return call


def in_phase(adapter: Adapter, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap each call to `function` in the phase named `name`."""
    return around(function, lambda *_: adapter.phase(name))


def followed(
    function: Callable[..., Any], after: Callable[[Any, BaseException | None], None]
) -> Callable[..., Any]:
    """Wrap `function` so that `after(self, error)` is called when a call ends. The error, if any,
    propagates unchanged."""

    @contextlib.contextmanager
    def context(first: Any, *_: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            after(first, error)
            raise
        after(first, None)

    return around(function, context)
