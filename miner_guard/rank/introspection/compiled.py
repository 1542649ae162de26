"""Keeps the hook out of the code that torch.compile captures. Never imports torch."""

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
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and compiler.is_compiling()


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude `function` from compilation: if a compiled function calls it, the graph breaks around
    the call.

    Otherwise torch would compile the hook too, and recompile it at each step, because its clocks
    and counters always differ. `torch.compiler.disable` has the same effect, but imports dynamo,
    which takes seconds.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        frames: Any = (
            sys.modules.get("torch._C._dynamo.eval_frame")
            if "torch._dynamo" in sys.modules
            else None
        )
        if frames is None:
            return function(*args, **kwargs)
        before = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(before)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside
