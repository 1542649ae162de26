"""The compiled hot path of the hook, _hot.c; rank/phases.py is the Python path."""

import weakref
from collections.abc import Callable
from mmap import mmap
from types import TracebackType
from typing import Any

LAYOUT: dict[str, int]
"""The layout that this module was built for, by constant name."""

class HotPhases:
    live: bool
    owner: int
    count: int
    started: float
    failed: Exception | None

    def __init__(
        self,
        map: mmap | None,
        monotonic: Callable[[], float] | None,
        remember: Callable[[float], None],
        memory: Callable[[], tuple[float | None, float | None]],
        columns: tuple[tuple[str, int], ...],
        notify_every_s: float,
    ) -> None: ...
    @property
    def open(self) -> int: ...
    def adopt_thread(self) -> None: ...
    def take(self, now: float, /) -> tuple[dict[str, float], float]: ...
    def reach(self, fd: int, path: bytes, notification: bytes, /) -> None: ...
    def watch(self, signal: int, /) -> None: ...
    def take_own(self) -> tuple[float, int]: ...
    def step(
        self,
        outer_step: Any,
        inner_step: Any,
        total_steps: Any,
        loss: Any,
        lr: Any,
        grad_norm: Any,
        eval_loss: Any,
        tokens: Any,
        /,
    ) -> int: ...

class HotPhase:
    def __init__(
        self, phases: HotPhases, name: bytes, column: int, allowance_s: float, longest_s: float
    ) -> None: ...
    def __enter__(self) -> HotPhase: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

class HotLoop:
    def __init__(
        self,
        torch: Any,
        backward: Callable[..., Any],
        slow_backward: Callable[..., Any],
        slow_stepping: Callable[[Any, Any, Any], None],
        slow_stepped: Callable[[Any, Any, Any], None],
        slow_step: Callable[[Any], None],
        notify: Callable[[], None],
    ) -> None: ...
    @property
    def armed(self) -> bool: ...
    @property
    def backward(self) -> Callable[..., Any]: ...
    def stepping(self, optimizer: Any, args: Any, kwargs: Any, /) -> None: ...
    def stepped(self, optimizer: Any, args: Any, kwargs: Any, /) -> None: ...
    def arm(
        self,
        phases: HotPhases,
        backward: HotPhase,
        optimizer: HotPhase,
        leader: weakref.ref[Any],
        steps: int,
        may_sum: bool,
        /,
    ) -> None: ...
    def disarm(self) -> tuple[float, int, int, bool]: ...
