"""A no-op version of the hook: training with it shows what the real hook costs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from uploads.decision import GateDecision


class NoGuard:
    """Accepts every call to the hook, does nothing, and allows every upload."""

    def phase(self, name: str, **_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, **_: Any) -> None:
        return None

    def diagnose(self, model: Any, **_: Any) -> None:
        return None

    def may_upload(
        self, *, outer_step: int, inner_step: int, kind: str = "gradient", **_: Any
    ) -> GateDecision:
        return GateDecision(True, kind, outer_step, inner_step, "no guard")

    def upload(self, decision: GateDecision, **_: Any) -> AbstractContextManager[Any]:
        return nullcontext(SimpleNamespace())

    def upload_due(self) -> bool:
        return False

    def checkpoint_requested(self) -> bool:
        return False

    def emit(self, finding: Any) -> None:
        return None

    def checkpoint_saved(self, path: Any, **_: Any) -> None:
        return None

    def close(self, finished: bool = False) -> None:
        return None
