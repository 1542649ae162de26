"""Keeps the hook's failures from affecting training: each kind is reported once as
`guard_degraded`, and training continues."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def harmless_or(fallback: Callable[[], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Wrap a method of `Guard` so that it never raises: it reports an exception as `guard_degraded`
    and returns `fallback()`.

    If a torch-compiled function calls the method, the graph breaks around the call. Otherwise torch
    would compile the hook too, and recompile it at each step, because its clocks and counters
    always differ. `torch.compiler.disable` has the same effect, but imports dynamo, which takes
    seconds. One wrapper does both jobs, because this path is hot.
    """

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def harmless(*args: P.args, **kwargs: P.kwargs) -> R:
            modules = sys.modules
            frames: Any = (
                modules.get("torch._C._dynamo.eval_frame") if "torch._dynamo" in modules else None
            )
            before = None if frames is None else frames.set_eval_frame(None)
            try:
                return method(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the miner's step is sacred; reported as guard_degraded
                guard: Any = args[0]
                guard._degraded(method.__name__, error)
                return fallback()
            finally:
                if frames is not None:
                    frames.set_eval_frame(before)

        harmless._torchdynamo_disable = True  # type: ignore[attr-defined]
        return harmless

    return wrap


def nothing() -> None:
    """The fallback for a method without a result."""
    return None


def no_reports() -> Sequence[Any]:
    """The fallback for a method that returns reports."""
    return ()
