"""The compiled hot path of the hook, _hot.c; rank/phases.py is the Python path."""

from collections.abc import Callable
from mmap import mmap
from types import TracebackType
from typing import Any

LAYOUT: dict[str, int]
"""What this module was built for, by name of its constants."""

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
