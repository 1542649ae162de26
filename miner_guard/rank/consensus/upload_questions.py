"""Asks the gate about uploads on behalf of the hook, and journals the decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from miner_guard.flight_recorder.journal import DecisionEntry
from miner_guard.rank.consensus import gating
from miner_guard.rank.consensus.collective_queries import CollectiveQueries
from miner_guard.rank.recorder import Recorder, describe
from miner_guard.rank.steps import Stepper
from miner_guard.rank.upload import UploadRecorder
from miner_guard.uploads.decision import GateDecision
from miner_guard.validators.facts import Candidate

_UNREAD = Candidate("gradient", -1, -1)


class UploadQuestions:
    """Asks about one rank's uploads. Never raises; blocks an upload that no rule has judged."""

    def __init__(
        self,
        gate: gating.Gate,
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
            self._recorder.own_log.say(gating.finding_of(decision))

    def recorder(self, decision: Any, phase: Any, tag: str | None) -> UploadRecorder:
        """Return the context manager that wraps an upload and records it in `phase`. `decision` is
        whatever the miner passed, unchecked."""
        if not isinstance(decision, GateDecision):
            wrong = TypeError(f"{type(decision).__name__} is not a decision from may_upload")
            self._report("upload", wrong)
            decision = self._gate.blocked(_UNREAD, "no decision was given")
        finished = self._gate.uploaded
        return UploadRecorder(self._recorder, phase, decision, finished=finished, tag=tag)
