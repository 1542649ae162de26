"""The gate inside the ranks: rank 0 decides, and all ranks get its decision."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.flight_recorder.records import json_default
from miner_guard.rank.consensus.agree import PAYLOAD_BYTES, NoConsensus
from miner_guard.rank.environment import RankContext
from miner_guard.rank.recorder import describe
from miner_guard.uploads import gate
from miner_guard.uploads.decision import GateDecision
from miner_guard.uploads.inputs import GateInputs, read, unknown
from miner_guard.validators import gradients, shapes
from miner_guard.validators.facts import Candidate
from miner_guard.validators.limits import Limits
from miner_guard.validators.outline import outline
from miner_guard.validators.verdict import Verdict

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
