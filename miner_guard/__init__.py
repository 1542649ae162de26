"""The supervisor that a distributed-training miner runs under.

Every rank imports this package, so this module imports nothing, and nothing in it fails: whatever
keeps the hook from running, from a broken installation to a hostile module beside the script,
`init` reports it and training continues.
"""

from __future__ import annotations

__version__ = "0.1.0"

_HOMES = {
    "Decision": "miner_guard.validators.facts",
    "Guard": "miner_guard.rank.guard",
    "MonitoringCostTracker": "miner_guard.costs",
    "get_global_tracker": "miner_guard.costs",
}

__all__ = [
    "Decision",
    "Guard",
    "MonitoringCostTracker",
    "__version__",
    "get_global_tracker",
    "init",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from miner_guard.costs import MonitoringCostTracker, get_global_tracker
    from miner_guard.rank.guard import Guard
    from miner_guard.validators.facts import Decision


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'miner_guard' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


_inert: Any = None
"""This process's `InertGuard`; None unless the hook could not begin."""


def init(state_dir: str | Path | None = None, *, agree: bool = True) -> Guard:
    """Create this rank's guard. Call it once on every rank, after init_process_group, because the
    ranks register with each other here.

    `state_dir` is for a miner that runs without a supervisor; under `miner-guard run` the ranks get
    it from the environment. With `agree=False`, the ranks set up their agreement only when the
    first collective question needs it. A second call returns the same guard. Never raises: if the
    guard's own code fails, the result is an `InertGuard`.
    """
    global _inert
    if _inert is None:
        try:
            from miner_guard.rank.guard import begin

            return begin(state_dir, agree=agree)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module that the import meets may raise anything; it is reported
            _inert = InertGuard(error)
    guard: Guard = _inert
    return guard


class InertGuard:
    """Stands in for `Guard` in a process where the guard's own code cannot run. Does nothing, and
    blocks uploads, because this rank cannot learn the answer that the other ranks get."""

    supervised = False
    error_count = 1

    def __init__(self, error: BaseException) -> None:
        import os

        self.rank, self.local_rank, self.world_size = (
            int(text) if (text := os.environ.get(name, "")).isdecimal() else default
            for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
        )
        try:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        except Exception:  # noqa: BLE001 - the error's own text fails
            text = type(error).__name__
        self.reason = f"the guard's hook cannot run on rank {self.rank}: {text}"
        said = f"GUARD DEGRADED: {self.reason}; training continues without it, uploads are blocked"
        try:
            os.write(2, f"{said}\n".encode("utf-8", "replace"))
        except OSError:
            # Without a standard error there is nowhere to say it.
            return

    def may_upload(
        self, *, outer_step: int, inner_step: int, kind: str = "gradient", **facts: Any
    ) -> _Blocked:
        return _Blocked(outer_step, inner_step, kind, self.reason)

    def may_publish(self, decision: Any, gradient: Any) -> Any:
        return decision

    def diagnose(self, model: Any = None, **values: Any) -> tuple[Any, ...]:
        return ()

    def phase(self, *arguments: Any, **options: Any) -> _Nothing:
        return _Nothing()

    def step(self, *arguments: Any, **values: Any) -> None:
        return None

    def upload_due(self, *arguments: Any, **values: Any) -> bool:
        return False

    upload = track = operation = phase
    checkpoint_saved = add_cost = emit = close = step
    checkpoint_requested = journal = upload_due


class _Nothing:
    """A phase or an upload that is not recorded. Callers may set any attribute on it."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _Blocked:
    """The `Decision` of an `InertGuard`."""

    allowed = due = stale = shadow = False
    verdicts = ()
    retry_after_steps = retry_after_s = None
    decided_at = 0.0
    decision_id = ""

    def __init__(self, outer_step: int, inner_step: int, kind: str, reason: str) -> None:
        self.outer_step, self.inner_step, self.kind = outer_step, inner_step, kind
        self.reason = reason

    def __bool__(self) -> bool:
        return False
