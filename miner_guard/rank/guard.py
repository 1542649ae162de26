"""The hook: what a miner calls in each of its ranks.

    guard = miner_guard.init()                          # each rank, once, after init_process_group
    with guard.phase("forward"): ...
    guard.step(outer_step=56, inner_step=84, loss=3.40, lr=2.1e-5)
    decision = guard.may_upload(outer_step=56, inner_step=84)  # collective: one answer
    if decision:
        with guard.upload(decision): ...
    guard.close(finished=True)

Nothing here raises, synchronises the GPU or uses the network. Each failure is reported once as
`guard_degraded`, and training continues.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from miner_guard.rank import dumps, environment
from miner_guard.rank.costs import RankCosts
from miner_guard.rank.journal import CheckpointEntry, TrainingEntry
from miner_guard.rank.questions import Questions, UploadRecorder
from miner_guard.rank.recorder import CLOSED, ENDED, FAILED, FINISHED, Recorder, describe
from miner_guard.rank.steps import Stepper
from miner_guard.record.events import Event
from miner_guard.system.clock import without_reentry
from miner_guard.validators.facts import Candidate, Decision

P = ParamSpec("P")
R = TypeVar("R")

_DIAGNOSE_TIMEOUT_S = 30.0
"""How long `guard.diagnose` waits for each rank."""


def compiling() -> bool:
    """Return whether torch.compile or torch.export is capturing the current code. The capture
    treats the result as a constant."""
    # Not `loaded_module`: the capture follows this call, but no read of a module's spec.
    is_compiling = getattr(sys.modules.get("torch.compiler"), "is_compiling", None)
    return is_compiling is not None and is_compiling()


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


def _no_reports() -> Sequence[Any]:
    return ()


class Guard:
    """One rank's hook, created by `init`."""

    def __init__(
        self, place: environment.RankContext, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.place = place
        self._monotonic = monotonic = without_reentry(monotonic)
        self._recorder = Recorder(place, monotonic)
        self._stepper = Stepper(place, self._recorder, self._degraded)
        self._phases = self._stepper.phases
        self._costs = RankCosts(self._recorder, self._phases, monotonic)
        self._questions = Questions(self._recorder, self._stepper, self._degraded)
        self._closed = False
        self._stacks = dumps.StackDumps(self._recorder.report_error)
        for remark in place.remarks:
            self._recorder.report_error(remark, remark)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def supervised(self) -> bool:
        """Whether a supervisor reads the journal."""
        return self._recorder.supervised

    @property
    def error_count(self) -> int:
        return self._recorder.error_count

    def phase(self, name: str, *, allowance_s: float | None = None) -> AbstractContextManager[Any]:
        """A context manager for a phase of the step: data, forward, backward, optimizer,
        checkpoint, … or any name.

        `monitor` encloses a monitoring callback and the phases in it. `allowance_s`: how long this
        phase may last before it counts as a hang; overrides `[hang]` for this phase. In code that
        torch.compile captures, the phase does nothing: reading a clock there would break the graph,
        or fail under fullgraph.
        """
        if compiling():
            return nullcontext()
        try:
            return self._phases.cached.get((name, allowance_s)) or self._phases.named(
                name, allowance_s
            )
        except Exception as error:  # noqa: BLE001 - the miner's step is sacred; reported as guard_degraded
            self._degraded("phase", error)
            return self._phases.named("other")

    @harmless_or(lambda: None)
    def step(
        self,
        *,
        outer_step: int | None = None,
        inner_step: int | None = None,
        loss: Any = None,
        lr: float | None = None,
        grad_norm: Any = None,
        tokens: int | None = None,
        total_steps: int | None = None,
        eval_loss: Any = None,
    ) -> None:
        """Mark the end of an inner step. Pass numbers as floats or CPU tensors: the guard does not
        read a GPU tensor, and reports it.

        `eval_loss`: the loss on held-out data, at steps that evaluate; the guard uses it to
        detect overfitting.
        """
        if self._closed:
            self._recorder.stepped_in_fork()
            return
        started = self._monotonic()
        self._stepper.end(
            (outer_step, inner_step, total_steps, loss, lr, grad_norm, eval_loss, tokens)
        )
        self._stacks.check()
        now = self._monotonic()
        self._costs.stepped(now - started, now)

    def may_upload(
        self,
        *,
        outer_step: int,
        inner_step: int,
        kind: str = "gradient",
        loss: Any = None,
        base_outer_step: int | None = None,
        files: Any = None,
        config: Any = None,
        metadata: Any = None,
        question: str | None = None,
    ) -> Decision:
        """Decide whether this upload may go out. Collective; every rank gets the same decision,
        which is truthy if the upload is allowed.

        `kind="archive"`: the upload after an AllReduce, exempt from the minimum inner step. If a
        rank does not ask within `[gate] broadcast_timeout_s`, each rank blocks the upload
        independently.
        `question`: identifies the call; it must be the same on every rank. Default: kind and steps.
        """
        candidate = Candidate(
            kind=kind,
            outer_step=outer_step,
            inner_step=inner_step,
            loss=loss,
            base_outer_step=base_outer_step,
            files=files,
            config=config,
            metadata=metadata,
        )
        return self._questions.may_upload(candidate, question)

    def may_publish(self, decision: Decision, gradient: Any) -> Decision:
        """Decide whether this compressed gradient may be written and sent, after `may_upload` has
        allowed the upload.

        Call it on rank 0 only; it is not collective, and any thread may call it. It compares names,
        types, shapes and the values of CPU tensors with what validators accept. Call it outside the
        training thread, because reading 100 MB takes about a second. Returns `decision` itself if
        the gradient is allowed.
        """
        return self._questions.may_publish(decision, gradient)

    def upload(self, decision: Decision, *, tag: str | None = None) -> UploadRecorder:
        """A context manager around the upload. It records and times the upload; the supervisor
        verifies it.

        Set `size_bytes`, and `tag` if not passed here, on the object it yields. It records an
        exception from the body and lets it propagate.
        """
        return self._questions.upload(decision, self._phases.named("upload"), tag)

    @harmless_or(lambda: False)
    def upload_due(self) -> bool:
        """Return whether the published upload is older than its target age. Collective; every rank
        gets the same answer.

        An upload that has just succeeded counts even before the guard polls the repo again.
        """
        return self._questions.upload_due()

    @harmless_or(lambda: False)
    def checkpoint_requested(self) -> bool:
        """Return whether someone has run `miner-guard ctl checkpoint` since this method last
        returned True. Collective; every rank gets the same answer."""
        return self._questions.checkpoint_requested()

    @harmless_or(_no_reports)
    def diagnose(
        self,
        model: Any = None,
        *,
        batch_size: int | None = None,
        effective_batch_size: int | None = None,
        accumulation_steps: int | None = None,
        model_name: str | None = None,
        upload_steps: int | None = None,
        inner_steps_per_outer: int | None = None,
        tokens_per_step: int | None = None,
    ) -> Sequence[Any]:
        """Diagnose the hardware and the placement of each rank's share of the model. Returns all
        ranks' reports on rank 0, and only its own report on any other rank. Collective."""
        from miner_guard.rank import diagnose

        reported = TrainingEntry(
            batch_size=batch_size,
            effective_batch_size=effective_batch_size,
            accumulation_steps=accumulation_steps,
            model_name=model_name,
            upload_steps=upload_steps,
            inner_steps_per_outer=inner_steps_per_outer,
            tokens_per_step=tokens_per_step,
        )
        gpu, state = self.place.settings.gpu, self.place.state
        return diagnose.diagnose(
            self._recorder,
            model,
            reported,
            deadline_s=_DIAGNOSE_TIMEOUT_S,
            expect=gpu.expect if isinstance(gpu.expect, int) else None,
            shapes_file=None if state is None else state.shapes,
        )

    @harmless_or(lambda: None)
    def checkpoint_saved(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        seconds: float | None = None,
        size_bytes: int | None = None,
        complete: bool = True,
    ) -> None:
        """Report that a checkpoint was saved."""
        self.journal(
            CheckpointEntry(
                path=str(path), step=step, seconds=seconds, size_bytes=size_bytes, complete=complete
            )
        )

    @harmless_or(lambda: None)
    def add_cost(self, operation: str, seconds: float, *, blocking: bool = True) -> None:
        """Add the cost of a monitoring operation, in seconds. `blocking`: whether training waited
        for it."""
        self._costs.add(str(operation), float(seconds), blocking)

    def track(self, operation: str) -> Any:
        """A context manager that times a monitoring operation for which training waits:
        `with guard.track("eval"): …`."""
        return self._costs.track(operation)

    def operation(self, name: str) -> AbstractContextManager[Any]:
        """A context manager that shows the guard a monitoring operation that is timed elsewhere, as
        `MonitoringCostTracker.track` does."""
        return self._costs.shown(str(name))

    @harmless_or(lambda: False)
    def journal(self, document: Any, /) -> bool:
        """Append an entry that must not be lost. Returns False if the journal has no room or this
        rank has no flight record."""
        return self._recorder.journal(document)

    @harmless_or(lambda: None)
    def emit(self, event: Event, /) -> None:
        """Log an event: through the supervisor if there is one, else from this process."""
        self._recorder.emit(event)

    @harmless_or(lambda: None)
    def close(self, finished: bool = False) -> None:
        """Close the guard. Pass `finished=True` only if training has reached its configured end.
        While an exception is propagating, the run is not marked as finished."""
        if self._closed:
            return
        error = sys.exc_info()[1]
        if finished and error is not None:
            self._recorder.report_error(
                "close",
                f"close(finished=True) was called while {describe(error)} was propagating; "
                "the run is not marked as finished",
            )
        self._end(FINISHED if finished and error is None else CLOSED)
        environment.unmark()

    def _end(self, state: str) -> None:
        self._costs.flush()
        self._closed = True
        self._phases.live = False
        self._recorder.show(state)

    def _degraded(self, where: str, error: BaseException) -> None:
        try:
            self._recorder.report_error(
                where, f"guard.{where}: {describe(error)}; training continues"
            )
        except Exception:  # noqa: BLE001 - reporting itself failed; `status` still shows the counter
            self._recorder.error_count += 1

    def _forked(self) -> None:
        self._closed = True
        self._phases.live = False
        self._recorder.detach_after_fork()

    def _exited(self, failed: bool) -> None:
        """Record that the process is exiting. `failed`: whether an exception caused the exit."""
        if not self._closed:
            self._attempt("exit", self._end, FAILED if failed else ENDED)

    def _begin(self, agree: bool) -> None:
        """Start everything that needs the other ranks or is optional; if one step fails, the others
        still run. `agree`: set up the agreement now."""
        if self.world_size > 1 and agree:
            self._attempt("agreement", self._questions.agreement)
        if self.place.state is not None:
            self._attempt("stacks", self._stacks.begin, self.place.state.stacks_of(self.rank))
            # Serve dumps even with a single rank: if a CUDA kernel never ends, the rank's
            # collectives queue up behind it.
            if self.world_size > 1 or environment.initialised_distributed() is not None:
                dump = self.place.state.collectives_of(self.rank)
                if (wire := self._recorder.wire) is not None:
                    self._attempt("collectives", wire.serve, lambda: dumps.write_collectives(dump))

    def _attempt(self, what: str, work: Callable[..., Any], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - what failed is optional; reported as guard_degraded
            self._degraded(what, error)


_current: Guard | None = None


def current() -> Guard | None:
    """This process's guard; None if none was begun or it is closed."""
    return None if _current is None or _current._closed else _current


def begin(state_dir: str | Path | None = None, *, agree: bool = True) -> Guard:
    """Create this rank's guard, or return the one that is open; see `miner_guard.init`. May
    raise."""
    global _current
    if _current is not None and not _current._closed:
        return _current
    guard = Guard(environment.find(state_dir=state_dir))
    _follow_process()
    guard._begin(agree)
    guard._attempt("mark", environment.mark, guard.place)
    _current = guard
    return guard


_followed = 0
"""The pid of the process whose exit is followed."""


def _follow_process() -> None:
    """Tell this process's guard of a fork, in the child, and of the process's end."""
    global _followed

    def forked() -> None:
        if _current is not None:
            _current._forked()

    def ended(failed: bool) -> None:
        if _current is not None:
            _current._exited(failed)

    if not _followed:
        os.register_at_fork(after_in_child=forked)
    if _followed != os.getpid():
        _followed = os.getpid()
        _at_exit(ended)


def _at_exit(ended: Callable[[bool], None]) -> None:
    """Call `ended(failed)` when this process exits through the interpreter, but not after
    `os._exit` or a signal.

    `failed`: whether an exception ended the process. The code of a `sys.exit` counts only in a
    multiprocessing child; elsewhere it is unknown here.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing import util

        # A multiprocessing child ends with os._exit, but runs its own finalizers first, while
        # `sys.exc_info` still holds the exception.
        util.Finalize(None, lambda: ended(_is_failure(sys.exc_info()[1])), exitpriority=0)
    else:
        atexit.register(lambda: ended(_uncaught()))


def _is_failure(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def _uncaught() -> bool:
    """Return whether the interpreter has reported an exception that reached the top level."""
    return hasattr(sys, "last_exc") or hasattr(sys, "last_value")
