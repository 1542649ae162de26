"""torch.compile and the hook: what a miner compiles must hold nothing of the guard. Never imports
torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def compiling() -> bool:
    """Whether torch.compile or export is capturing what runs now; it sees this as a constant."""
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and compiler.is_compiling()


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run as it stands where a compiled function calls it: the graph ends before it and
    continues after it.

    Else torch compiles the hook as well, and again at each step, since its clocks and counters are
    never the same. As `torch.compiler.disable`, which would import dynamo, and that takes seconds.
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
