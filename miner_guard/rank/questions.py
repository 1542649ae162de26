"""The questions that all ranks ask together: may this upload go out, is one due, is a checkpoint
wanted. Rank 0 answers them, and every rank gets its answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.rank import agree, environment, journal
from miner_guard.rank.agree import LATE, PAYLOAD_BYTES, Group, NoConsensus, SingleRank
from miner_guard.rank.environment import RankContext
from miner_guard.rank.journal import DecisionEntry
from miner_guard.rank.layout import json_default
from miner_guard.rank.phases import AnyPhase
from miner_guard.rank.recorder import Recorder, describe
from miner_guard.rank.steps import Report, Stepper
from miner_guard.uploads import gate
from miner_guard.uploads.decision import GateDecision
from miner_guard.uploads.inputs import GateInputs, read, unknown
from miner_guard.validators import gradients, shapes
from miner_guard.validators.facts import Candidate
from miner_guard.validators.limits import Limits
from miner_guard.validators.outline import outline
from miner_guard.validators.verdict import Verdict


class UploadRecorder:
    """Records one upload. Rank 0 always reports it; any other rank reports it only if it fails
    there."""

    def __init__(
        self,
        recorder: Recorder,
        phase: AnyPhase,
        decision: GateDecision,
        *,
        finished: Callable[[], None],
        tag: str | None = None,
    ) -> None:
        """`finished` is called when the upload ends without an error."""
        self._recorder = recorder
        self._phase = phase
        self._finished = finished
        self._started = 0.0
        self.decision = decision
        self.tag = tag
        """The tag of the upload, such as `5.56.51`."""

        self.size_bytes: int | None = None
        self.attempts: int | None = None
        self.checksum: str | None = None
        """Set if the publisher reports it."""

        self.error: str | None = None
        """Set if the upload failed without an exception."""

    def __enter__(self) -> UploadRecorder:
        self._started = self._recorder.monotonic()
        if not self.decision.allowed:
            self._recorder.report_error(
                "upload", "the miner started an upload that the gate had blocked"
            )
        if self._recorder.place.rank == 0:
            self._write("started")
        self._phase.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._phase.__exit__(kind, error, trace)
        if error is not None and self.error is None:
            self.error = describe(error)
        if self.error is not None:
            self._write("failed")
            return
        self._finished()
        if self._recorder.place.rank == 0:
            self._write("finished")

    def _write(self, phase: str) -> None:
        try:
            self._recorder.journal(self._entry(phase))
        except Exception as error:  # noqa: BLE001 - the upload itself continues; reported as guard_degraded
            self._recorder.report_error(
                "upload entry", f"the upload could not be recorded: {describe(error)}"
            )

    def _entry(self, phase: str) -> journal.UploadEntry:
        decision = self.decision
        return journal.UploadEntry(
            phase=phase,
            decision_id=decision.decision_id,
            outer_step=decision.outer_step,
            inner_step=decision.inner_step,
            kind=decision.kind,
            tag=self.tag,
            seconds=None if phase == "started" else self._recorder.monotonic() - self._started,
            bytes=self.size_bytes,
            attempts=self.attempts,
            checksum=_shown(self.checksum),
            error=self.error,
        )


def _shown(checksum: str | None) -> str | None:
    """Return the first 32 characters. The guard would redact a whole sha256, because it looks like
    a private key."""
    return None if checksum is None else checksum[:32]


_SHORT = 100


class Agreement(Protocol):
    """Interface through which the ranks agree on one answer."""

    def share(self, question: str, answer: bytes | None) -> bytes:
        """Return rank 0's answer on every rank. Raises NoConsensus."""
        ...


class Gate:
    """Runs the rules on rank 0 and shares their decision."""

    def __init__(self, place: RankContext, monotonic: Callable[[], float]) -> None:
        self._place = place
        self._settings = place.settings.gate
        self._monotonic = monotonic
        self._local = 0
        self._uploaded_at: float | None = None

    def ask(
        self, agreement: Callable[[], Agreement], candidate: Candidate, question: str | None = None
    ) -> tuple[GateDecision, str | None]:
        """Return the decision and, if the ranks did not agree on one, what went wrong; this rank
        then blocks the upload. Collective."""
        question = question or f"{candidate.kind} {candidate.outer_step} {candidate.inner_step}"
        own = self._judged(candidate) if self._place.rank == 0 else None
        try:
            answer = agreement().share(question, None if own is None else pack(own))
        except NoConsensus as error:
            return self.blocked(candidate, str(error)), str(error)
        # Rank 0 uses the shared answer too, so that all ranks have the same decision. It restores
        # only the replay record and the verdicts, which may have been dropped to make the answer
        # fit.
        decision = GateDecision.from_dict(json.loads(answer))
        return (
            decision if own is None else replace(decision, record=own.record, verdicts=own.verdicts)
        ), None

    def ready(self, decision: GateDecision, gradient: Any) -> GateDecision:
        """Judge the gradient that is about to be written: first its names, types and shapes, then
        its values. Rank 0 only.

        Returns `decision` itself if the gradient passes, or if the profile does not define what
        validators accept. Never raises.
        """
        candidate = Candidate(decision.kind, decision.outer_step, decision.inner_step)
        try:
            inputs = self._inputs()
            limits = Limits.of(self._settings, inputs.limits)
            if limits.gradients_value_dtype is None and limits.gradients_metadata_key is None:
                return decision
            known = None if self._place.state is None else shapes.read(self._place.state.shapes)
            report = outline(gradient, limits, known)
            if not report["problems"]:
                report = _contents(gradient, limits, known)
        except Exception as error:  # noqa: BLE001 - the audit judges what cannot be judged here
            report = {"reason": f"the gradient could not be inspected: {describe(error)}"}
        judged = self._judged(replace(candidate, files=report))
        refused = any(v.rule == gradients.RULE and v.outcome == "block" for v in judged.verdicts)
        return judged if refused else decision

    def due(self) -> bool:
        """Return whether the published upload is older than its target age, as far as this rank
        knows."""
        inputs, now = self._inputs(), self._monotonic()
        if self._just_uploaded(inputs.published.seen_at, now):
            return False
        return gate.due(inputs, self._settings, now)

    def uploaded(self) -> None:
        """Record that an upload from this rank has just succeeded. It counts as published until the
        guard checks the repo again."""
        self._uploaded_at = self._monotonic()

    def _just_uploaded(self, seen_at: float | None, now: float) -> bool:
        if self._uploaded_at is None or (seen_at is not None and seen_at > self._uploaded_at):
            return False
        return now - self._uploaded_at <= self._settings.repo_age_target_s

    def _judged(self, candidate: Candidate) -> GateDecision:
        try:
            return self._decided(candidate)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; blocking tells them all the reason
            return self.blocked(
                candidate, f"the gate failed: {describe(error)}; the upload is blocked"
            )

    def _decided(self, candidate: Candidate) -> GateDecision:
        return gate.decide(
            candidate, self._inputs(), self._settings, now=self._monotonic(), wall=time.time()
        )

    def _inputs(self) -> GateInputs:
        if self._place.state is None:
            return unknown("no supervisor is watching the repo")
        return read(self._place.state.gate_inputs)

    def blocked(self, candidate: Candidate, why: str) -> GateDecision:
        """Return a decision, made by this rank, that blocks the upload. In shadow mode it allows
        the upload and only reports the block.

        Its id differs in each launch, because the ledger accepts each id only once.
        """
        self._local += 1
        shadow = self._settings.mode == "shadow"
        return GateDecision(
            allowed=shadow,
            kind=candidate.kind,
            outer_step=candidate.outer_step,
            inner_step=candidate.inner_step,
            reason=f"shadow mode, would be blocked: {why}" if shadow else why,
            verdicts=(Verdict("agreement", "block", None, None, why),),
            shadow=shadow,
            decided_at=time.time(),
            decision_id=f"local-{self._place.run_id}-{self._place.settings.launch}-{self._place.rank}-{self._local}",
        )


def _contents(gradient: Any, limits: Limits, known: shapes.Shapes | None) -> dict[str, Any]:
    import torch

    from miner_guard.validators.in_memory import contents

    return contents(torch, gradient, limits, known)


def pack(decision: GateDecision) -> bytes:
    """Encode the decision for the other ranks, shortened if it does not fit."""
    document: dict[str, Any] = {**decision.as_dict(), "record": {}}
    payload = _encoded(document)
    if len(payload) > PAYLOAD_BYTES:
        payload = _encoded({**document, "verdicts": [], "reason": decision.reason[:1000]})
    if len(payload) > PAYLOAD_BYTES:
        # The text is not ASCII: JSON takes up to twelve bytes per character.
        short = {"reason": decision.reason[:_SHORT], "kind": str(decision.kind)[:_SHORT]}
        payload = _encoded({**document, "verdicts": [], **short})
    return payload


def _encoded(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), default=json_default).encode()


def finding_of(decision: GateDecision) -> Finding:
    """Convert the decision to a finding, for a rank that logs without a supervisor."""
    return make_finding(
        "upload_allowed" if decision.allowed else "upload_blocked",
        rank=0,
        reason=decision.reason,
        outer_step=decision.outer_step,
        inner_step=decision.inner_step,
        kind=decision.kind,
        verdicts=[v.as_dict() for v in decision.verdicts],
        decision_id=decision.decision_id,
    )


class CollectiveQueries:
    """Asks collective questions on behalf of one rank. All methods but `agreement` wait for the
    other ranks, in the `collective` phase."""

    def __init__(
        self,
        place: environment.RankContext,
        gate: Gate,
        recorder: Recorder,
        stepper: Stepper,
        *,
        report: Report,
    ) -> None:
        """`report` receives the error if rank 0 fails to find its answer."""
        self._place = place
        self._gate = gate
        self._recorder = recorder
        self._stepper = stepper
        self._report = report
        self._agreement: Agreement | None = None
        self._no_group: str | None = None
        self._checkpoints = 0
        self._notices: tuple[int, bool, int] = (-1, False, 0)

    def agreement(self) -> Agreement:
        """The agreement between the ranks. The first call creates it, at a point that all ranks
        reach. Raises NoConsensus if the ranks can't agree."""
        if self._agreement is None:
            dist = environment.initialised_distributed()
            if dist is not None and dist.get_world_size() > 1:
                self._check_place(dist.get_rank(), dist.get_world_size())
                self._agreement = self._group(dist)
            elif self._place.world_size > 1:
                raise NoConsensus(
                    "torch.distributed is not initialised, so the "
                    f"{self._place.world_size} ranks can't agree"
                )
            else:
                self._agreement = SingleRank()
        return self._agreement

    def _group(self, dist: Any) -> Group:
        if self._no_group is None:
            try:
                return agree.group_of(dist, self._place)
            except Exception as error:  # noqa: BLE001 - torch's versions raise different types; reported
                self._no_group = f"the ranks can't reach each other: {describe(error)}"
        # Do not try again in this launch: all ranks must number their questions identically.
        raise NoConsensus(self._no_group)

    def _check_place(self, rank: int, world_size: int) -> None:
        # Slurm and MPI pass the rank in variables that the guard does not know, so before
        # init_process_group every rank assumes that it is rank 0.
        if (rank, world_size) != (self._place.rank, self._place.world_size):
            self._recorder.report_error(
                "place",
                f"this is rank {rank} of {world_size}, but it is recorded as rank "
                f"{self._place.rank} of {self._place.world_size}: call miner_guard.init() after "
                "init_process_group",
            )

    def may_upload(
        self, candidate: Candidate, question: str | None
    ) -> tuple[GateDecision, str | None]:
        """Return the decision and, if the ranks did not agree on one, what went wrong
        (`Gate.ask`)."""
        with self._waiting():
            return self._gate.ask(self.agreement, candidate, question)

    def upload_due(self) -> bool:
        """Return whether the published upload is older than its target age. Raises NoConsensus."""
        return self._notice()[1]

    def checkpoint_requested(self) -> bool:
        """Return whether a checkpoint has been requested since this method last returned True.
        Raises NoConsensus."""
        asked = self._notice()[2]
        if asked <= self._checkpoints:
            return False
        self._checkpoints = asked
        return True

    def _notice(self) -> tuple[int, bool, int]:
        """Return (step, upload due, checkpoint requests) as rank 0 knows them. The ranks share them
        once per step."""
        step = self._stepper.count
        if self._notices[0] != step:
            due, requests = self._shared(f"notice {step}", self._notice_here).split()
            self._notices = (step, due == b"1", int(requests))
        return self._notices

    def _notice_here(self) -> bytes:
        flight = self._recorder.flight
        asked = 0 if flight is None else flight.checkpoint_requests()
        try:
            return b"%d %d" % (self._gate.due(), asked)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; reported as guard_degraded
            self._report("upload_due", error)
            return b"0 %d" % asked

    def due(
        self, operation: str, every_s: float | None, every_steps: int | None, step: int | None
    ) -> bool:
        """Return whether an operation is due. `MonitoringCostTracker.due` decides that on rank 0.
        `step` defaults to this process's step. Raises NoConsensus."""
        count = self._stepper.count

        def here() -> bytes:
            return b"%d" % self._due_here(
                operation, every_s, every_steps, count if step is None else step
            )

        return self._shared(f"due {operation} {count}", here) == b"1"

    def _due_here(
        self, operation: str, every_s: float | None, every_steps: int | None, step: int
    ) -> bool:
        from miner_guard.costs.global_tracker import get_global_tracker

        try:
            return get_global_tracker().due(
                operation, every_s=every_s, every_steps=every_steps, step=step
            )
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; reported as guard_degraded
            self._report("due", error)
            return False

    def _shared(self, question: str, here: Callable[[], bytes]) -> bytes:
        """Call `here` on rank 0 and return its result on every rank."""
        own = here() if self._place.rank == 0 else None
        with self._waiting():
            return self.agreement().share(question, own)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            with self._stepper.names.named("collective"):
                yield
        finally:
            if isinstance(self._agreement, Group) and self._agreement.late:
                on = f" on {absent}" if (absent := self._agreement.absent) else ""
                self._recorder.report_error(
                    LATE, f"a rank{on} did not ask in time, and the ranks can no longer agree"
                )


_UNREAD = Candidate("gradient", -1, -1)


class UploadQuestions:
    """Asks about one rank's uploads. Never raises; blocks an upload that no rule has judged."""

    def __init__(
        self,
        gate: Gate,
        questions: CollectiveQueries,
        stepper: Stepper,
        recorder: Recorder,
        *,
        report: Callable[[str, BaseException], None],
    ) -> None:
        self._gate = gate
        self._questions = questions
        self._stepper = stepper
        self._recorder = recorder
        self._report = report

    def may_upload(self, given: Candidate, question: str | None) -> GateDecision:
        """Decide whether an upload may go out. `given` holds the miner's values, unchecked.
        Collective."""
        candidate, agreed = _UNREAD, None
        try:
            candidate = self._checked(given)
            agreed, wrong = self._questions.may_upload(candidate, question)
            self._decided(agreed, wrong)
        except Exception as error:  # noqa: BLE001 - an upload that no rule judged must not go out, and training must continue
            self._report("may_upload", error)
            if agreed is None:
                return self._gate.blocked(candidate, f"the hook failed: {describe(error)}")
        # The agreed decision holds even if something fails in this rank afterwards, because the
        # other ranks act on it.
        return agreed

    def _checked(self, given: Candidate) -> Candidate:
        base = self._stepper.whole("base_outer_step", given.base_outer_step)
        losses = tuple(self._stepper.losses)
        last = self._stepper.known("loss", given.loss)
        return replace(
            given,
            outer_step=self._number("outer_step", given.outer_step),
            inner_step=self._number("inner_step", given.inner_step),
            loss=last if last is not None else (losses[-1] if losses else None),
            recent_losses=losses,
            base_outer_step=None if base is None or base < 0 else base,
        )

    def _number(self, name: str, given: Any) -> int:
        """A candidate's step number; -1 if unknown."""
        number = self._stepper.whole(name, given)
        return -1 if number is None else number

    def may_publish(self, decision: GateDecision, gradient: Any) -> GateDecision:
        """Decide whether the compressed gradient may be uploaded; returns `decision` itself if so.
        Rank 0 only."""
        try:
            judged = self._gate.ready(decision, gradient)
            if judged is not decision:
                self._decided(judged, None)
        except Exception as error:  # noqa: BLE001 - the gate has already allowed this upload
            self._report("may_publish", error)
            return decision
        return judged

    def _decided(self, decision: GateDecision, wrong: str | None) -> None:
        """Journal a decision on rank 0. `wrong`: why the decision applies only to this rank; None
        if all ranks share it."""
        if wrong is not None:
            self._recorder.report_error(
                f"agreement {decision.outer_step}",
                f"may_upload blocks the upload on this rank only: {wrong}",
            )
        if self._recorder.place.rank != 0:
            return
        document = decision.as_dict()
        if not self._recorder.journal(DecisionEntry(decision=document)):
            short = {**document, "verdicts": [], "record": {}}
            self._recorder.journal(DecisionEntry(decision=short))
        if self._recorder.notifier.alone:
            self._recorder.own_log.say(finding_of(decision))

    def recorder(self, decision: Any, phase: Any, tag: str | None) -> UploadRecorder:
        """Return the context manager that wraps an upload and records it in `phase`. `decision` is
        whatever the miner passed, unchecked."""
        if not isinstance(decision, GateDecision):
            wrong = TypeError(f"{type(decision).__name__} is not a decision from may_upload")
            self._report("upload", wrong)
            decision = self._gate.blocked(_UNREAD, "no decision was given")
        finished = self._gate.uploaded
        return UploadRecorder(self._recorder, phase, decision, finished=finished, tag=tag)
