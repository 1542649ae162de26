"""Keeps the hook from affecting training: its failures are reported once as `guard_degraded`, and
torch.compile does not capture it. Never imports torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def compiling() -> bool:
    """Return whether torch.compile or torch.export is capturing the current code. The capture
    treats the result as a constant."""
    # Not `loaded_module`: the capture follows this call, but no read of a module's spec.
    is_compiling = getattr(sys.modules.get("torch.compiler"), "is_compiling", None)
    return is_compiling is not None and is_compiling()


def loaded_module(name: str) -> Any:
    """The module `name` if the program has imported it to its end, else None; never imports it.

    While another thread imports a module, it is in `sys.modules` already, but lacks most of its
    attributes.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


_frames: Any = None
"""The module that switches dynamo's capture off and on; None while dynamo is not imported."""


def skip_wrappers() -> None:
    """Tell dynamo not to capture the wrappers themselves. It would warn that it cannot trace the
    call that switches it off, and ask the user to report that. Does nothing before dynamo is
    imported."""
    global _frames
    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip_code is not None and _frames is None:
        skip_code(uncompiled(skip_wrappers).__code__)
        _frames = sys.modules.get("torch._C._dynamo.eval_frame")


def uncompiled(
    function: Callable[P, R], failed: Callable[[Any, Exception], R] | None = None
) -> Callable[P, R]:
    """Exclude `function` from compilation: if a compiled function calls it, the graph breaks around
    the call. With `failed`, return `failed(first argument, error)` where the function raises.

    Otherwise torch would compile the hook too, and recompile it at each step, because its clocks
    and counters always differ. `torch.compiler.disable` has the same effect, but imports dynamo,
    which takes seconds.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if _frames is None:
            skip_wrappers()
        frames = _frames
        before = None if frames is None else frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if failed is None:
                raise
            return failed(args[0], error)
        finally:
            if frames is not None:
                frames.set_eval_frame(before)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside


def harmless_or(fallback: Callable[[], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Wrap a method of `Guard` so that it never raises: it reports an exception as `guard_degraded`
    and returns `fallback()`. It is also `uncompiled`."""

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        def failed(guard: Any, error: Exception) -> R:
            guard._degraded(method.__name__, error)
            return fallback()

        return uncompiled(method, failed)

    return wrap
