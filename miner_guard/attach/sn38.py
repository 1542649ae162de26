"""Hooks subnet 38's unmodified miner, in its versions since 2025-03-27, by wrapping methods of its
classes as soon as Python defines them.

    base class      __init__ (afterwards the process group exists, and the guard starts), run
    miner class     inner_optimizer_step, start_background_upload, upload_model, the phases below
    state_loader    load_state_from_peer

ops/sn38/README.md has the facts and dates. Code that is not recognised is reported and stays
unhooked.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from miner_guard.attach.adapter import Adapter, followed, in_phase
from miner_guard.attach.sn38_uploads import Sn38Uploads, paused
from miner_guard.record.events import event
from miner_guard.system.clock import Once

_PHASES = {
    "fetch_training_data": "data",
    "all_reduce_local": "allreduce",
    "maybe_sync_and_reload": "collective",
    "pause_training": "pause",
}
_STEP = "inner_optimizer_step"
_COMPONENTS = ("_init_training_components", "_init_basic_components")


class Subnet38:
    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.uploads = Sn38Uploads(adapter)
        self._diagnosed = False
        self._failure = Once()

    # Called when the miner's modules are imported.

    def base(self, module: Any) -> None:
        """Hook the base class; its module was just imported."""
        base = getattr(module, "BaseMinerNeuron", None)
        if not inspect.isclass(base):
            self.adapter.degraded(
                f"{module.__name__} has no class BaseMinerNeuron; use --attach log"
            )
            return
        inherited = vars(base).get("__init_subclass__")
        follow = self.subclass
        quiet = self.adapter.quiet

        def follow_subclass(cls: Any, /, **kwargs: Any) -> None:
            if inherited is None:
                super(base, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
            else:
                inherited.__func__(cls, **kwargs)
            quiet(follow, cls)

        setattr(base, "__init_subclass__", classmethod(follow_subclass))  # noqa: B010 - mypy rejects an assignment to a method
        self._replace(base, "__init__", lambda f: followed(f, self._initialised))
        if "run" in vars(base):
            self._replace(base, "run", lambda f: followed(f, self._loop_ended))

    def state_loader(self, module: Any) -> None:
        """Hook the function that loads states; its module was just imported. Do it now, because
        other modules import the function by name."""
        if callable(getattr(module, "load_state_from_peer", None)):
            loader = in_phase(self.adapter, module.load_state_from_peer, "load_state")
            module.load_state_from_peer = followed(loader, self._loaded)

    def subclass(self, cls: type) -> None:
        """Hook the miner's class, which Python has just defined."""
        if not hasattr(cls, _STEP):
            # This class does not train, so it is not hooked. The `log_attach` monitor reads the
            # miner's output instead.
            return
        members = vars(cls)
        for name, phase in _PHASES.items():
            if name in members:
                self._replace(cls, name, functools.partial(in_phase, self.adapter, name=phase))
        if _STEP in members:
            self._replace(cls, _STEP, self._timed)
        for name in ("_process_training_batch", "fetch_training_data"):
            if name in members:
                self._replace(cls, name, lambda f: followed(f, self._perhaps_failed))
        if "_training_worker" in members:
            self._replace(cls, "_training_worker", lambda f: followed(f, self._loop_ended))
        for name in _COMPONENTS:
            if name in members:
                self._replace(cls, name, lambda f: followed(f, self._watch_pauses))
        if "start_background_upload" in members:
            self._replace(cls, "start_background_upload", self.uploads.gated)
        if "upload_model" in members:
            self._replace(cls, "upload_model", self.uploads.recorded)

    def _replace(self, cls: type, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
        function = vars(cls).get(name)
        if not inspect.isfunction(function):
            self.adapter.degraded(
                f"{cls.__name__} defines no method {name}; the guard cannot follow it"
            )
            return
        setattr(cls, name, wrap(function))

    # Called while the miner runs.

    def _initialised(self, miner: Any, error: BaseException | None) -> None:
        if error is None and hasattr(miner, _STEP):
            self.adapter.quiet(functools.partial(self.adapter.begin, agree=True))

    def _watch_pauses(self, miner: Any, error: BaseException | None) -> None:
        active = getattr(miner, "training_active", None)
        if error is None and type(active) is threading.Event:
            miner.training_active = WatchedEvent(self.adapter, active)

    def _loaded(self, miner: Any, error: BaseException | None) -> None:
        if error is None and not self._diagnosed and self.adapter.guard is not None:
            self._diagnosed = True
            self.adapter.quiet(self._diagnose, miner)

    def _diagnose(self, miner: Any) -> None:
        assert self.adapter.guard is not None
        neuron = getattr(getattr(miner, "config", None), "neuron", None)
        self.adapter.guard.diagnose(
            getattr(miner, "model", None),
            batch_size=getattr(neuron, "local_batch_size_train", None),
            effective_batch_size=getattr(neuron, "local_batch_size_train_effective", None),
            accumulation_steps=_accumulation(neuron, self.adapter.guard.world_size),
            model_name=getattr(neuron, "global_model_name", None),
            upload_steps=getattr(neuron, "upload_steps", None),
        )

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        inner = in_phase(self.adapter, function, "optimizer")

        @functools.wraps(function)
        def step(miner: Any, *args: Any, **kwargs: Any) -> Any:
            # Read the numbers before the call, as the miner's own log line does: the call
            # increments the counters.
            numbers = self.adapter.quiet(self._step_numbers, miner)
            result = inner(miner, *args, **kwargs)
            self._stepped(miner, numbers)
            return result

        return step

    def _stepped(self, miner: Any, numbers: dict[str, Any] | None) -> None:
        # A step inside an AllReduce is not a training step.
        if numbers is not None and self.adapter.guard is not None and not paused(miner):
            self.adapter.guard.step(**numbers)
            # Before 2025-09, a miner that is in sync loads its own state through a different
            # function.
            self._loaded(miner, None)

    def _step_numbers(self, miner: Any) -> dict[str, Any]:
        """The miner's current outer and inner step, loss and learning rate. Raises
        AttributeError."""
        groups = getattr(getattr(miner, "inner_optimizer", None), "param_groups", None)
        return {
            "outer_step": miner.local_progress.epoch,
            "inner_step": miner.local_progress.inner_step,
            "loss": getattr(miner.local_progress, "loss", None),
            "lr": groups[0]["lr"] if groups else None,
        }

    def _perhaps_failed(self, miner: Any, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, what: str) -> None:
        if not self._failure.first():
            return
        # Do not report an incident here: rank 0's output already leads to one, and every rank
        # reaches this line.
        text = (
            "training loop failed; the miner swallows the error and will exit with "
            f"code 0: {what[:500]}"
        )
        self.adapter.emit(event("rank_message", "error", text, text=text))

    def _loop_ended(self, miner: Any, error: BaseException | None) -> None:
        swallowed = getattr(miner, "training_error", None)
        if error is not None or swallowed:
            self._failed(str(swallowed or f"{type(error).__name__}: {error}"))
        if self.adapter.guard is not None:
            self.adapter.guard.close(finished=False)


class WatchedEvent(threading.Event):
    """Replaces the miner's `training_active`: while a thread waits for it, the rank is in the
    `pause` phase."""

    def __init__(self, adapter: Adapter, replaced: threading.Event) -> None:
        super().__init__()
        self._adapter = adapter
        if replaced.is_set():
            self.set()

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set():
            return True
        with self._adapter.phase("pause"):
            return super().wait(timeout)


def _accumulation(neuron: Any, world_size: int) -> int | None:
    batch = getattr(neuron, "local_batch_size_train", None)
    effective = getattr(neuron, "local_batch_size_train_effective", None)
    return max(effective // (batch * world_size), 1) if batch and effective else None


_subnet = Subnet38(Adapter("sn38"))


def imported(name: str, module: Any) -> None:
    """Hook a watched module. The sitecustomize calls this after the module is imported."""
    if name.endswith(".state_loader"):
        _subnet.state_loader(module)
    else:
        _subnet.base(module)
