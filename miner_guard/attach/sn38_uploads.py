"""Gates subnet 38's uploads when they start, and checks their outcome when they end."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from miner_guard.attach.adapter import Adapter
from miner_guard.record.events import event
from miner_guard.record.redaction import SECRET_NAME
from miner_guard.system.clock import Once
from miner_guard.validators.facts import Decision

_PARAMETERS = {"epoch", "archive"}
"""The parameters of the signatures to date: (epoch) and (epoch, archive=False)."""

_UNREAD = {"outer_step": -1, "inner_step": -1}
"""The candidate that a rank asks about if it cannot read its real one. Rank 0 blocks it; on any
other rank only rank 0's answer counts."""

_REVISION = re.compile(r"\w+\.\d+\.\d+")


class Sn38Uploads:
    """Handles the miner's uploads. Every rank asks the gate; the worker's exit code shows whether
    an upload succeeded."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._deciding: ContextVar[Decision | None] = ContextVar("deciding", default=None)
        """The decision about the upload that this thread is just starting."""

        self._questions = 0
        self._keys = Once()

    def gated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `start_background_upload`. If the gate blocks the upload, the miner gathers nothing
        and uses up no error feedback."""
        signature = inspect.signature(function)
        unknown = [
            name
            for name, parameter in list(signature.parameters.items())[1:]
            if name not in _PARAMETERS and parameter.default is inspect.Parameter.empty
        ]
        if unknown or "epoch" not in signature.parameters:
            self._adapter.degraded(
                f"{function.__name__} has an unknown signature {signature}; uploads are not gated"
            )
            return function

        @functools.wraps(function)
        def start(miner: Any, *args: Any, **kwargs: Any) -> Any:
            decision = self._ask(signature, miner, args, kwargs)
            if decision is not None and not decision.allowed:
                return None
            deciding = self._deciding.set(decision)
            try:
                with self._adapter.phase("upload"):
                    return function(miner, *args, **kwargs)
            finally:
                self._deciding.reset(deciding)

        return start

    def _ask(
        self, signature: inspect.Signature, miner: Any, args: Any, kwargs: Any
    ) -> Decision | None:
        guard = self._adapter.guard
        if guard is None:
            self._adapter.degraded(
                "an upload began before the guard started; the gate did not judge it"
            )
            return None
        self._questions += 1
        # A rank that cannot read its candidate must still ask, because the others wait for it.
        candidate = self._adapter.quiet(self._candidate, signature, miner, args, kwargs) or _UNREAD
        return guard.may_upload(**candidate, question=f"upload {self._questions}")

    def _candidate(
        self, signature: inspect.Signature, miner: Any, args: Any, kwargs: Any
    ) -> dict[str, Any]:
        arguments = signature.bind(miner, *args, **kwargs).arguments
        return self._documents(miner) | {
            # Use the local counter, not `epoch`: only rank 0 keeps the global one up to date.
            "outer_step": miner.local_progress.epoch,
            # This is the outer step of the loaded state: loading sets it, and an AllReduce advances
            # it.
            "base_outer_step": miner.local_progress.epoch,
            "inner_step": miner.local_progress.inner_step,
            "kind": "archive" if arguments.get("archive") or paused(miner) else "gradient",
            "loss": getattr(miner.local_progress, "loss", None),
        }

    def _documents(self, miner: Any) -> dict[str, Any]:
        """The documents that the miner is about to publish with the gradient, if they already
        exist. Older miners publish neither blocks nor metadata."""
        documents: dict[str, Any] = {}
        config: Any = getattr(getattr(miner, "model", None), "config", None)
        if hasattr(config, "block_list"):
            documents["config"] = {"block_list": config.block_list}
        package = sys.modules.get("distributed_training")
        run, progress = getattr(package, "__run__", None), miner.local_progress
        if run is not None and hasattr(miner, "dht"):
            # Leave out the peer id: reading it may query another process, and validators accept
            # any.
            documents["metadata"] = {
                "run": run,
                "outer_step": progress.epoch,
                "inner_step": progress.inner_step,
                "peer_id": "",
            }
        return documents

    def recorded(self, function: Callable[..., Any]) -> property:
        """Wrap `upload_model`, which the upload thread calls: ask the gate again, now that the
        gradient exists, and record the real outcome.

        The miner looks up the method when it starts an upload, and passes it to its upload thread.
        So each lookup binds the decision about that upload, even if the gate decides on another
        upload before the thread runs.
        """

        def bound(miner: Any) -> Callable[..., Any]:
            decision = self._deciding.get()

            @functools.wraps(function)
            def upload_model(*args: Any, **kwargs: Any) -> Any:
                return self._upload(function, decision, (miner, *args), kwargs)

            return upload_model

        return property(bound)

    def _upload(
        self, function: Callable[..., Any], decision: Decision | None, args: Any, kwargs: Any
    ) -> Any:
        miner, guard = args[0], self._adapter.guard
        if guard is None:
            return function(*args, **kwargs)
        decision = decision or self._ungated(miner)
        gradient = self._adapter.quiet(_gradient, function, args, kwargs)
        # Only rank 0 publishes. The call is not collective, because the other ranks do not need the
        # answer.
        if gradient is not None and guard.rank == 0:
            decision = guard.may_publish(decision, gradient)
            if not decision.allowed:
                # The miner returns False for a cancelled upload, too.
                return False
        before = getattr(miner, "upload_process", None)
        with guard.upload(decision) as record:
            result = function(*args, **kwargs)
            self._adapter.quiet(self._look, miner, before, result, record)
            return result

    def _ungated(self, miner: Any) -> Decision:
        progress = getattr(miner, "local_progress", None)
        outer, inner = (getattr(progress, name, None) or 0 for name in ("epoch", "inner_step"))
        return Decision(True, "gradient", int(outer), int(inner), "not gated")

    def _warn_of_keys(self, words: Any) -> None:
        if not any(_is_key(str(word)) for word in words) or not self._keys.first():
            return
        step = (
            "every user on this host can read them while it runs: give the miner a dedicated host "
            "or container, or mount /proc with hidepid=2"
        )
        self._adapter.emit(
            event(
                "secret_exposed",
                "warning",
                "SECRET EXPOSED: the upload worker's command line shows the bucket's write keys; "
                + step,
                where="the upload worker's command line",
                kind="the bucket's write keys",
                next_step=step,
            )
        )

    def _look(self, miner: Any, before: Any, result: Any, record: Any) -> None:
        worker = getattr(miner, "upload_process", None)
        if worker is not None and worker is not before:
            # The arguments contain the write keys, so read only the revision.
            words = worker.args if isinstance(worker.args, (list, tuple)) else ()
            record.tag = next((str(w) for w in words if _REVISION.fullmatch(str(w))), None)
            self._warn_of_keys(words)
            if worker.poll() not in (0, None):
                record.error = (
                    f"the upload worker exited with code {worker.returncode}, no matter what the "
                    "miner logs"
                )
        if result is False:
            record.error = "the upload was cancelled; the published files may be inconsistent"


def _gradient(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The compressed gradient among the arguments of an `upload_model` call; None if there is
    none."""
    return inspect.signature(function).bind(*args, **kwargs).arguments.get("gradient_state")


def _is_key(word: str) -> bool:
    return any(
        SECRET_NAME.search(name) and len(word) >= 8 and word == value
        for name, value in os.environ.items()
    )


def paused(miner: Any) -> bool:
    """Return whether the miner has paused training, as it does for an AllReduce."""
    active = getattr(miner, "training_active", None)
    return isinstance(active, threading.Event) and not active.is_set()
