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

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

from miner_guard.eventlog.catalog import Finding
from miner_guard.flight_recorder.journal import CheckpointEntry, DecisionEntry, TrainingEntry
from miner_guard.rank import ending, environment
from miner_guard.rank.consensus import gating
from miner_guard.rank.consensus.collective_queries import CollectiveQueries
from miner_guard.rank.costs import RankCosts
from miner_guard.rank.introspection import collectives, stacks
from miner_guard.rank.introspection.compiled import compiling
from miner_guard.rank.recorder import CLOSED, ENDED, FAILED, FINISHED, Recorder, describe
from miner_guard.rank.steps import Stepper
from miner_guard.rank.upload import UploadRecorder
from miner_guard.state_dir import StateDir
from uploads.decision import GateDecision
from validators.facts import Candidate

P = ParamSpec("P")
R = TypeVar("R")


def _harmless(fallback: Callable[[], R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Wrap a method of `Guard`: any exception becomes one `guard_degraded` and the fallback's
    value.

    When a torch-compiled function calls it, the graph breaks around the call. Otherwise torch would
    compile the hook too, and recompile it at each step, because its clocks and counters always
    differ. Same effect as `torch.compiler.disable`, which imports dynamo and so takes seconds. A
    single frame does both: this path is hot.
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
            except Exception as error:  # noqa: BLE001 - the miner's step is sacred; said as guard_degraded
                guard: Any = args[0]
                guard._degraded(method.__name__, error)
                return fallback()
            finally:
                if frames is not None:
                    frames.set_eval_frame(before)

        harmless._torchdynamo_disable = True  # type: ignore[attr-defined]
        return harmless

    return wrap


def _nothing() -> None:
    return None


def _no_reports() -> Sequence[Any]:
    return ()


class Guard:
    """The hook of one rank, created by `init`."""

    def __init__(
        self, place: environment.RankContext, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.place = place
        self._monotonic = monotonic
        self._recorder = Recorder(place, monotonic)
        self._gate = gating.Gate(place, monotonic)
        self._costs = RankCosts(self._recorder, monotonic)
        self._stepper = Stepper(place, self._recorder, self._degraded)
        self._hot = self._stepper.hot
        self._questions = CollectiveQueries(
            place, self._gate, self._recorder, self._stepper, report=self._degraded
        )
        self._closed = False
        self._stacks: IO[bytes] | None = None
        for remark in place.remarks:
            self._recorder.report_error(remark, remark)

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.place.rank

    @property
    def local_rank(self) -> int:
        """The rank within its node."""
        return self.place.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.place.world_size

    @property
    def supervised(self) -> bool:
        """A supervisor reads the journal."""
        return self._recorder.supervised

    @property
    def troubles(self) -> int:
        """Failures inside the hook so far, reported or not."""
        return self._recorder.error_count

    # steps

    def phase(self, name: str, *, allowance_s: float | None = None) -> AbstractContextManager[Any]:
        """A context manager for a phase of the step: data, forward, backward, optimizer,
        checkpoint, … or any name.

        `monitor` encloses a monitoring callback and the phases in it. `allowance_s`: how long this
        phase may last before it counts as a hang, if the settings do not define it. In code that
        torch.compile captures it does nothing: a clock there would break the graph, or fail under
        fullgraph.
        """
        if compiling():
            return nullcontext()
        try:
            return self._hot.names.known.get((name, allowance_s)) or self._hot.names.named(
                name, allowance_s
            )
        except Exception as error:  # noqa: BLE001 - the miner's step is sacred; said as guard_degraded
            self._degraded("phase", error)
            return self._hot.names.named("other")

    @_harmless(_nothing)
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
        """Mark the end of an inner step. Numbers are floats or CPU tensors; a GPU tensor is not
        read, and is reported.

        `eval_loss`: on held-out data, at the steps that evaluated; it reveals overfitting.
        """
        if self._closed:
            return
        if self._hot.step is not None and not self._recorder.notifier.alone:
            done = self._hot.step(
                outer_step, inner_step, total_steps, loss, lr, grad_norm, eval_loss, tokens
            )
            if done:
                if done > 1:
                    self._stepper.notify()
                    self._costs.own(*self._hot.take_own())
                if self._stacks is not None and stacks.taken():
                    self._yield_signal(self._stacks)
                return
        started, stepper = self._monotonic(), self._stepper
        record = stepper.record
        record.outer_step, record.inner_step, record.tokens = outer_step, inner_step, tokens
        record.loss, record.lr, record.grad_norm, record.eval_loss = loss, lr, grad_norm, eval_loss
        record.total_steps = stepper.count + 1 if total_steps is None else total_steps
        stepper.end()
        if self._stacks is not None and stacks.taken():
            self._yield_signal(self._stacks)
        self._costs.own(self._monotonic() - started)

    # the gate

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
        revision: str | None = None,
        question: str | None = None,
    ) -> GateDecision:
        """May this upload go out? Collective, with the same answer on every rank; truthy if it may.

        `kind="archive"`: the upload after an AllReduce, which is always allowed. If a rank does not
        ask within `[gate] broadcast_timeout_s`, each rank blocks by itself. `question`: what all
        ranks must ask identically; by default the kind and the steps.
        """
        candidate, agreed = Candidate("gradient", -1, -1), None
        try:
            base = self._stepper.whole("base_outer_step", base_outer_step)
            losses = tuple(self._stepper.losses)
            last = self._stepper.known("loss", loss)
            candidate = Candidate(
                kind=kind,
                outer_step=self._stepped("outer_step", outer_step),
                inner_step=self._stepped("inner_step", inner_step),
                loss=last if last is not None else (losses[-1] if losses else None),
                recent_losses=losses,
                base_outer_step=None if base is None or base < 0 else base,
                files=files,
                config=config,
                metadata=metadata,
                revision=revision,
            )
            agreed, wrong = self._questions.may_upload(candidate, question)
            self._decided(agreed, wrong)
        except Exception as error:  # noqa: BLE001 - an upload that no rule judged must not go out, and training must continue
            self._degraded("may_upload", error)
            if agreed is None:
                return self._gate.blocked(candidate, f"the hook failed: {describe(error)}")
        # The agreed decision stands, whatever fails afterwards in this rank: the other ranks act on
        # it.
        return agreed

    def may_publish(self, decision: GateDecision, gradient: Any) -> GateDecision:
        """May this compressed gradient be written and sent, after `may_upload` has allowed it?

        For rank 0 only, not collective, callable from any thread. Compares names, types and shapes
        with what validators accept; reads no tensor. If allowed, returns `decision` itself.
        """
        try:
            judged = self._gate.ready(decision, gradient)
            if judged is not decision:
                self._decided(judged, None)
        except Exception as error:  # noqa: BLE001 - the gate has let it pass before
            self._degraded("may_publish", error)
            return decision
        return judged

    def _stepped(self, name: str, given: Any) -> int:
        """A candidate's step number; -1 if unknown."""
        number = self._stepper.whole(name, given)
        return -1 if number is None else number

    def _decided(self, decision: GateDecision, wrong: str | None) -> None:
        if wrong is not None:
            self._recorder.report_error(
                f"agreement {decision.outer_step}",
                f"may_upload is blocked on this rank alone: {wrong}",
            )
        if self.rank != 0:
            return
        document = decision.as_dict()
        if not self._recorder.journal(DecisionEntry(decision=document)):
            short = {**document, "verdicts": [], "record": {}}
            self._recorder.journal(DecisionEntry(decision=short))
        if self._recorder.notifier.alone:
            self._recorder.own_log.say(gating.finding_of(decision))

    def upload(self, decision: GateDecision, *, tag: str | None = None) -> UploadRecorder:
        """A context manager around the upload: records and times it; the supervisor verifies it.

        Set `tag` (if not given) and `size_bytes` on the object it yields. Exceptions from the body
        are recorded and propagate.
        """
        given: Any = decision
        if not isinstance(given, GateDecision):
            self._degraded(
                "upload", TypeError(f"{type(given).__name__} is no decision of may_upload")
            )
            given = self._gate.blocked(Candidate("gradient", -1, -1), "no decision was given")
        phase = self._hot.names.named("upload")
        return UploadRecorder(self._recorder, phase, given, finished=self._gate.uploaded, tag=tag)

    @_harmless(lambda: False)
    def upload_due(self) -> bool:
        """Whether the published upload is past its target age. Collective, the same answer on every
        rank.

        An upload that just succeeded counts even before the guard's next poll of the repo.
        """
        return self._questions.upload_due()

    @_harmless(lambda: False)
    def checkpoint_requested(self) -> bool:
        """Whether `miner-guard ctl checkpoint` was run since the last True. Collective, the same on
        every rank."""
        return self._questions.checkpoint_requested()

    # the rest

    @_harmless(_no_reports)
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
        """Every rank's hardware and the placement of its share of the model, on rank 0; elsewhere
        this rank's only. Collective."""
        from miner_guard.rank.introspection import diagnose

        given = TrainingEntry(
            batch_size=batch_size,
            effective_batch_size=effective_batch_size,
            accumulation_steps=accumulation_steps,
            model_name=model_name,
            upload_steps=upload_steps,
            inner_steps_per_outer=inner_steps_per_outer,
            tokens_per_step=tokens_per_step,
        )
        expect = self.place.settings.gpu.expect
        reports: Sequence[Any] = diagnose.diagnose(
            self,
            model,
            given,
            deadline_s=self.place.settings.gpu.diagnose_timeout_s,
            expect=expect if isinstance(expect, int) else None,
            shapes_file=None if self.place.state is None else self.place.state.shapes,
        )
        return reports

    @_harmless(_nothing)
    def checkpoint_saved(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        seconds: float | None = None,
        size_bytes: int | None = None,
        complete: bool = True,
    ) -> None:
        """Report a checkpoint that was saved."""
        self.journal(
            CheckpointEntry(
                path=str(path), step=step, seconds=seconds, size_bytes=size_bytes, complete=complete
            )
        )

    @_harmless(_nothing)
    def add_cost(self, operation: str, seconds: float, *, blocking: bool = True) -> None:
        """Account for a monitoring operation. `blocking`: training waited for it."""
        self._costs.add(str(operation), float(seconds), blocking)

    @_harmless(lambda: False)
    def due(
        self,
        operation: str,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
        step: int | None = None,
    ) -> bool:
        """Whether a monitoring operation should run now: rank 0's `MonitoringCostTracker.due`, for
        all ranks.

        Collective: for an operation that itself contains a collective and so must run on all ranks
        or on none. Give `every_s` or `every_steps`; `step` defaults to the count kept by
        `guard.step`.
        """
        if every_s is None and every_steps is None:
            raise ValueError(f"due({operation!r}) needs every_s or every_steps")
        return self._questions.due(operation, every_s, every_steps, step)

    def track(self, operation: str) -> Any:
        """`with guard.track("eval"): …` times a monitoring operation that training waits for."""
        return self._costs.track(operation)

    @_harmless(lambda: False)
    def journal(self, document: Any, /) -> bool:
        """Append an entry that must not be lost; False if there is no room or no flight record."""
        return self._recorder.journal(document)

    @_harmless(_nothing)
    def emit(self, finding: Finding, /) -> None:
        """Log a finding: through the supervisor if there is one, else from this process."""
        self._recorder.emit(finding)

    @_harmless(_nothing)
    def close(self, finished: bool = False) -> None:
        """Close the guard. Pass `finished=True` only after the configured end; with an exception in
        flight it does not count as a finish."""
        if self._closed:
            return
        error = sys.exc_info()[1]
        if finished and error is not None:
            self._recorder.report_error(
                "close", f"close(finished=True) with {describe(error)} in flight is not a finish"
            )
        self._end(FINISHED if finished and error is None else CLOSED)
        environment.unmark()

    def _end(self, state: str) -> None:
        self._costs.own(*self._hot.take_own())
        self._costs.flush()
        self._closed = True
        self._hot.phases.live = False
        self._recorder.close(state)

    def _degraded(self, where: str, error: BaseException) -> None:
        try:
            self._recorder.report_error(
                where, f"guard.{where}: {describe(error)}; training continues"
            )
        except Exception:  # noqa: BLE001 - there is no one left to tell but the counter, which status shows
            self._recorder.error_count += 1

    def _forked(self) -> None:
        self._closed = True
        self._hot.phases.live = False
        self._recorder.detach_after_fork()

    def _begin(self, agree: bool) -> None:
        """Steps that need the other ranks or may fail harmlessly, each isolated from the rest."""
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        ending.at_exit(functools.partial(_ended, weakref.ref(self)))
        if self.world_size > 1 and agree:
            self._attempt("agreement", self._questions.agreement)
        if self.place.state is not None:
            self._attempt("stacks", self._register_stacks, self.place.state)
            if self.world_size > 1:
                self._attempt(
                    "collectives", collectives.serve, self.place.state.collectives_of(self.rank)
                )

    def _register_stacks(self, state: StateDir) -> None:
        self._stacks = stacks.register(state.stacks_of(self.rank))

    def _yield_signal(self, file: IO[bytes]) -> None:
        """The program now handles the signal itself: the supervisor must stop sending it."""
        self._stacks = None
        stacks.release(file)
        self._recorder.report_error(
            "stacks", f"{stacks.STACKS_SIGNAL.name} is now used by the program: {stacks.WITHOUT}"
        )

    def _attempt(self, what: str, work: Callable[..., Any], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - what failed is optional; said as guard_degraded
            self._degraded(what, error)


def _forget(guard: weakref.ref[Guard]) -> None:
    if (own := guard()) is not None:
        own._forked()


def _ended(guard: weakref.ref[Guard], failed: bool) -> None:
    """The process exits and the program has not closed the guard."""
    if (own := guard()) is not None and not own._closed:
        own._attempt("exit", own._end, FAILED if failed else ENDED)


_current: Guard | None = None


def current() -> Guard | None:
    """This process's guard, if `init` was called and the guard is still open."""
    return None if _current is None or _current._closed else _current


def init(state_dir: str | Path | None = None, *, agree: bool = True) -> Guard:
    """Create the guard of this rank. Call once on every rank, after init_process_group (the ranks
    register). Never raises.

    `state_dir` is for a miner that runs without a supervisor; `miner-guard run` passes it itself.
    `agree=False` defers setting up the agreement to the first question that needs it. A second call
    returns the same guard.
    """
    global _current
    if _current is not None and not _current._closed:
        return _current
    try:
        guard = Guard(environment.find(state_dir=state_dir))
    except Exception as error:  # noqa: BLE001 - training starts without a record rather than not at all; said below
        guard = Guard(
            environment.RankContext(
                0, 0, 1, f"alone-{os.getpid()}", None, environment.RankSettings()
            )
        )
        guard._degraded("init", error)
    guard._begin(agree)
    guard._attempt("mark", environment.mark, guard.place)
    _current = guard
    return guard
