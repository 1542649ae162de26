"""The questions that all ranks ask together: may this upload go out, is one due, is a checkpoint
wanted. Rank 0 answers them, and every rank gets its answer. Never raises for an upload; blocks one
that no rule has judged.

The rules are imported with the first question, because they cost a third of the hook's start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from miner_guard.rank import environment
from miner_guard.rank.agree import LATE, Group, NoConsensus, group_of
from miner_guard.rank.environment import RankContext
from miner_guard.rank.journal import DecisionEntry, UploadEntry
from miner_guard.rank.layout import json_default
from miner_guard.rank.phases import Phase
from miner_guard.rank.recorder import Recorder, describe
from miner_guard.rank.steps import Report, Stepper
from miner_guard.record.events import Event
from miner_guard.record.lines import upload_decided
from miner_guard.validators.facts import Candidate, Decision, Verdict

if TYPE_CHECKING:
    from miner_guard.uploads.gate import GateInputs

_UNREAD = Candidate("gradient", -1, -1)


class Gate:
    """Runs the rules in this rank."""

    def __init__(self, place: RankContext, monotonic: Callable[[], float]) -> None:
        self._place = place
        self._settings = place.settings.gate
        self._monotonic = monotonic
        self._local = 0
        self._uploaded_at: float | None = None

    def decide(self, candidate: Candidate) -> Decision:
        """Return the rules' decision. An error in them blocks. Never raises."""
        from miner_guard.uploads import gate

        try:
            return gate.decide(
                candidate, self._inputs(), self._settings, now=self._monotonic(), wall=time.time()
            )
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; blocking tells them all the reason
            return self.blocked(
                candidate, f"the gate failed: {describe(error)}; the upload is blocked"
            )

    def judge_gradient(self, decision: Decision, gradient: Any) -> Decision:
        """Judge the gradient that is about to be written.

        Returns `decision` itself if the gradient passes, or if the profile does not define what
        validators accept. Never raises.
        """
        from miner_guard.validators import shapes
        from miner_guard.validators.limits import Limits

        candidate = Candidate(decision.kind, decision.outer_step, decision.inner_step)
        try:
            limits = Limits.of(self._settings, self._inputs().limits)
            if limits.gradients_value_dtype is None and limits.gradients_metadata_key is None:
                return decision
            expected = None if self._place.state is None else shapes.read(self._place.state.shapes)
            import torch

            from miner_guard.validators.decoding import contents

            report = contents(torch, gradient, limits, expected)
        except Exception as error:  # noqa: BLE001 - the audit judges what cannot be judged here
            report = {"reason": f"the gradient could not be inspected: {describe(error)}"}
        judged = self.decide(replace(candidate, files=report))
        refused = any(v.rule == "gradients" and v.outcome == "block" for v in judged.verdicts)
        return judged if refused else decision

    def due(self) -> bool:
        """Return whether the published upload is older than its target age, as far as this rank
        knows. An upload that has just succeeded counts until the guard checks the repo again."""
        from miner_guard.uploads import gate

        inputs, now, uploaded = self._inputs(), self._monotonic(), self._uploaded_at
        checked = inputs.published.seen_at
        unchecked = uploaded is not None and (checked is None or checked <= uploaded)
        if unchecked and now - (uploaded or 0.0) <= self._settings.repo_age_target_s:
            return False
        return gate.due(inputs, self._settings, now)

    def uploaded(self) -> None:
        self._uploaded_at = self._monotonic()

    def _inputs(self) -> GateInputs:
        from miner_guard.uploads.gate import read, unknown

        if self._place.state is None:
            return unknown("no supervisor is watching the repo")
        return read(self._place.state.gate_inputs)

    def blocked(self, candidate: Candidate, why: str) -> Decision:
        """Return a decision, made by this rank, that blocks the upload. In shadow mode it allows
        the upload and only reports the block.

        Its id differs in each launch, because the ledger accepts each id only once.
        """
        self._local += 1
        shadow = self._settings.mode == "shadow"
        place = self._place
        return Decision(
            allowed=shadow,
            kind=candidate.kind,
            outer_step=candidate.outer_step,
            inner_step=candidate.inner_step,
            reason=f"shadow mode, would be blocked: {why}" if shadow else why,
            verdicts=(Verdict("agreement", "block", None, None, why),),
            shadow=shadow,
            decided_at=time.time(),
            decision_id=f"local-{place.run_id}-{place.settings.launch}-{place.rank}-{self._local}",
        )


def pack(decision: Decision) -> bytes:
    """Encode the decision for the other ranks."""
    return json.dumps(decision.as_dict(), separators=(",", ":"), default=json_default).encode()


def _event_of(decision: Decision) -> Event:
    """Convert the decision to an event, for a rank that logs without a supervisor."""
    fields = {
        "reason": decision.reason,
        "outer_step": decision.outer_step,
        "inner_step": decision.inner_step,
        "kind": decision.kind,
        "verdicts": [v.as_dict() for v in decision.verdicts],
        "decision_id": decision.decision_id,
    }
    level = "info" if decision.allowed else "warning"
    return upload_decided(level, fields, allowed=decision.allowed, rank=0)


class Questions:
    """Asks the collective questions on behalf of one rank. Those that ask wait for the other ranks,
    in the `collective` phase."""

    def __init__(self, recorder: Recorder, stepper: Stepper, report: Report) -> None:
        """`report` receives the error if rank 0 fails to find its answer."""
        self._place = recorder.place
        self._gate = Gate(recorder.place, recorder.monotonic)
        self._recorder = recorder
        self._stepper = stepper
        self._report = report
        self._agreement: Group | None = None
        self._no_group: str | None = None
        self._checkpoints = self._taken_up = self._passed_on = 0
        """Requests for checkpoints: those known to all ranks, and those of this node's guard that
        the training loop has learned of and that rank 0 has been told of."""

    def agreement(self) -> Group | None:
        """The agreement between the ranks; None for a world size of 1. The first call creates it,
        at a point that all ranks reach. Raises NoConsensus if the ranks can't agree."""
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
        return self._agreement

    def _group(self, dist: Any) -> Group:
        if self._no_group is None:
            try:
                return group_of(dist, self._place.settings.gate.broadcast_timeout_s)
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

    # uploads

    def may_upload(self, reported: Candidate, question: str | None) -> Decision:
        """Decide whether an upload may go out. `reported` holds the miner's values, unchecked.
        Collective."""
        candidate, agreed = _UNREAD, None
        try:
            candidate = self._checked(reported)
            agreed, wrong = self._ask(candidate, question)
            self._record(agreed, wrong)
        except Exception as error:  # noqa: BLE001 - an upload that no rule judged must not go out, and training must continue
            self._report("may_upload", error)
            if agreed is None:
                return self._gate.blocked(candidate, f"the hook failed: {describe(error)}")
        # The agreed decision holds even if something fails in this rank afterwards, because the
        # other ranks act on it.
        return agreed

    def _ask(self, candidate: Candidate, question: str | None) -> tuple[Decision, str | None]:
        """Return the decision and, if the ranks did not agree on one, what went wrong; this rank
        then blocks the upload."""
        question = question or f"{candidate.kind} {candidate.outer_step} {candidate.inner_step}"
        try:
            answer = self._share(question, lambda: pack(self._gate.decide(candidate)))
        except NoConsensus as error:
            return self._gate.blocked(candidate, str(error)), str(error)
        return Decision.from_dict(json.loads(answer)), None

    def _checked(self, reported: Candidate) -> Candidate:
        stepper = self._stepper
        base = stepper.whole("base_outer_step", reported.base_outer_step)
        losses = tuple(stepper.losses)
        last = stepper.as_float("loss", reported.loss)
        outer, inner = (
            -1 if (number := stepper.whole(name, getattr(reported, name))) is None else number
            for name in ("outer_step", "inner_step")
        )
        return replace(
            reported,
            outer_step=outer,
            inner_step=inner,
            loss=last if last is not None else (losses[-1] if losses else None),
            recent_losses=losses,
            base_outer_step=None if base is None or base < 0 else base,
        )

    def may_publish(self, decision: Decision, gradient: Any) -> Decision:
        """Decide whether the compressed gradient may be uploaded; returns `decision` itself if so.
        Rank 0 only; not collective."""
        try:
            judged = self._gate.judge_gradient(decision, gradient)
            if judged is not decision:
                self._record(judged, None)
        except Exception as error:  # noqa: BLE001 - the gate has already allowed this upload
            self._report("may_publish", error)
            return decision
        return judged

    def _record(self, decision: Decision, wrong: str | None) -> None:
        if wrong is not None:
            self._recorder.report_error(
                f"agreement {decision.outer_step}",
                f"may_upload blocks the upload on this rank only: {wrong}",
            )
        if self._recorder.place.rank != 0:
            return
        self._recorder.journal(DecisionEntry(decision=decision.as_dict()))
        if self._recorder.alone:
            self._recorder.say(_event_of(decision))

    def upload(self, decision: Any, phase: Phase, tag: str | None) -> UploadRecorder:
        """Return the context manager that wraps an upload and records it in `phase`. `decision` is
        whatever the miner passed, unchecked."""
        if not isinstance(decision, Decision):
            wrong = TypeError(f"{type(decision).__name__} is not a decision from may_upload")
            self._report("upload", wrong)
            decision = self._gate.blocked(_UNREAD, "no decision was given")
        return UploadRecorder(
            self._recorder, phase, decision, finished=self._gate.uploaded, tag=tag
        )

    # what rank 0 knows

    def upload_due(self) -> bool:
        """Return whether the published upload is older than its target age. Raises NoConsensus."""
        return self._number("upload_due", self._gate.due) == 1

    def checkpoint_requested(self) -> bool:
        """Return whether the guard of any node has requested a checkpoint since this method last
        returned True. Raises NoConsensus."""
        flight = self._recorder.flight
        own = 0 if flight is None else flight.checkpoint_requests()
        elsewhere = self._from_other_nodes(own)
        requests = self._number("checkpoint_requested", lambda: own + elsewhere)
        new = requests > self._checkpoints
        if new:
            self._checkpoints, self._taken_up = requests, own
        if flight is not None:
            flight.take_up(self._taken_up, again=not new)
        return new

    def _from_other_nodes(self, own: int) -> int:
        """Tell rank 0 of the requests of this node's guard; on rank 0, return those of the other
        nodes' guards."""
        place, told = self._place, self._passed_on
        if place.local_rank or not 0 < place.local_world_size < place.world_size:
            return 0
        self._passed_on = own
        if place.rank and own == told:
            return 0
        try:
            group = self.agreement()
            return (
                0 if group is None else group.count("checkpoints", own - told if place.rank else 0)
            )
        except Exception as error:  # noqa: BLE001 - torch's versions raise different types; the other ranks wait for this one
            self._report("checkpoint_requested", error)
            return 0

    def _number(self, name: str, read: Callable[[], int]) -> int:
        """Return on every rank what `read` returns on rank 0; 0 if it fails there."""

        def here() -> bytes:
            try:
                return b"%d" % read()
            except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; reported as guard_degraded
                self._report(name, error)
                return b"0"

        return int(self._share(f"{name} {self._stepper.count}", here))

    def _share(self, question: str, answer: Callable[[], bytes]) -> bytes:
        """Return on every rank what `answer` returns on rank 0. Raises NoConsensus."""
        try:
            with self._stepper.phases.named("collective"):
                group = self.agreement()
                return answer() if group is None else group.share(question, answer)
        finally:
            if self._agreement is not None and self._agreement.late:
                who = self._agreement.absent or "a rank"
                self._recorder.report_error(
                    LATE, f"{who} did not ask in time, and the ranks can no longer agree"
                )


class UploadRecorder:
    """Journals the start and the end of one upload: `with guard.upload(decision): …`. Rank 0 always
    reports it; any other rank reports it only if it fails there."""

    def __init__(
        self,
        recorder: Recorder,
        phase: Phase,
        decision: Decision,
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
        """Set by the miner, if its store reports one."""

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
        decision, checksum = self.decision, self.checksum
        try:
            self._recorder.journal(
                UploadEntry(
                    phase=phase,
                    decision_id=decision.decision_id,
                    outer_step=decision.outer_step,
                    inner_step=decision.inner_step,
                    upload_kind=decision.kind,
                    tag=self.tag,
                    seconds=None
                    if phase == "started"
                    else self._recorder.monotonic() - self._started,
                    bytes=self.size_bytes,
                    attempts=self.attempts,
                    # The guard would redact a whole sha256, because it looks like a private key.
                    checksum=None if checksum is None else checksum[:32],
                    error=self.error,
                )
            )
        except Exception as error:  # noqa: BLE001 - the upload itself continues; reported as guard_degraded
            self._recorder.report_error(
                "upload entry", f"the upload could not be recorded: {describe(error)}"
            )
