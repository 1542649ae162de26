"""The gate: may this upload go out?

Pure and standard library only: it runs inside rank 0. The same candidate, inputs, settings and
times give the same decision, so the ledger can replay it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.uploads.decision import GateDecision
from miner_guard.uploads.inputs import GateInputs, canonical
from miner_guard.validators import rules
from miner_guard.validators.facts import Candidate, Facts, Verdict, worst
from miner_guard.validators.limits import Limits, in_force

_MAX_LENGTH = 240
"""Maximum length of a sentence in characters: a decision with all its verdicts must fit in one
journal entry (4080 bytes)."""


def decide(
    candidate: Candidate, inputs: GateInputs, settings: GateSettings, *, now: float, wall: float
) -> GateDecision:
    """Judge a candidate at `now` (monotonic) and `wall`. Never raises: if a rule
    raises, the upload is blocked, with the error as the reason."""
    record: Mapping[str, Any] = {}
    try:
        candidate = rules.reduced(candidate)
        record = recorded(candidate, inputs, settings, now)
        facts, limits = _facts(candidate, inputs, settings, now)
        verdicts = tuple(
            _worded(v) for v in rules.evaluate_all(rules.gate_rules(facts, limits), facts, limits)
        )
    except Exception as error:  # noqa: BLE001 -- an error in the gate must block every rank, not raise in rank 0
        facts = Facts(candidate, now=now)
        limits = Limits()
        verdicts = (_worded(rules.rule_error("gate", error)),)
    return _concluded(facts, limits, verdicts, settings=settings, record=record, wall=wall)


def recorded(
    candidate: Candidate, inputs: GateInputs, settings: GateSettings, now: float
) -> dict[str, Any]:
    """The part of a replay's data that is not in the inputs, which the ledger stores by digest."""
    stated = {
        name: value for name, value in vars(candidate).items() if value is not None and value != ()
    }
    for name in ("loss", "recent_losses"):
        if name in stated:
            stated[name] = _as_json(stated[name])
    record = {
        "candidate": stated,
        "settings": dict(vars(settings)),
        "inputs": inputs.digest,
        "now": now,
    }
    return (
        record
        if inputs.reason is None
        else {**record, "inputs_unknown": inputs.reason[:_MAX_LENGTH]}
    )


def _as_json(value: Any) -> Any:
    """Replace NaN and infinities with text: JSON cannot represent them, and a replay needs them."""
    if isinstance(value, (list, tuple)):
        return [_as_json(v) for v in value]
    return value if math.isfinite(value) else str(float(value))


def _facts(
    candidate: Candidate, inputs: GateInputs, settings: GateSettings, now: float
) -> tuple[Facts, Limits]:
    known = inputs.aged(now, settings.inputs_max_age_s)
    facts = Facts(candidate, known.published, known.network, now, known.credentials, known.bucket)
    return facts, in_force(Limits.of(settings, known.limits), known.network)


def _worded(verdict: Verdict) -> Verdict:
    """The verdict as stored in the decision: its sentence fits in a journal entry."""
    if len(verdict.sentence) <= _MAX_LENGTH:
        return verdict
    return replace(verdict, sentence=verdict.sentence[:_MAX_LENGTH])


def _concluded(
    facts: Facts,
    limits: Limits,
    verdicts: Sequence[Verdict],
    *,
    settings: GateSettings,
    record: Mapping[str, Any],
    wall: float,
) -> GateDecision:
    candidate, published = facts.candidate, facts.published
    blocked = worst(verdicts) == "block"
    shadow = blocked and settings.mode == "shadow"
    blocks = [v for v in verdicts if v.outcome == "block"]
    age = rules.age_now(published, facts.now)
    return GateDecision(
        allowed=not blocked or shadow,
        kind=candidate.kind,
        outer_step=candidate.outer_step,
        inner_step=candidate.inner_step,
        reason=_reason(verdicts, blocks, shadow),
        verdicts=tuple(verdicts),
        due=published.empty or (age is not None and age > limits.repo_age_target_s),
        stale=age is not None and age > limits.repo_age_limit_s,
        shadow=shadow,
        retry_after_steps=max(
            (v.retry_after_steps for v in blocks if v.retry_after_steps is not None), default=None
        ),
        retry_after_s=max(
            (v.retry_after_s for v in blocks if v.retry_after_s is not None), default=None
        ),
        decided_at=wall,
        decision_id=hashlib.sha256(canonical([record, wall]).encode()).hexdigest()[:16],
        record=record,
    )


def _reason(verdicts: Sequence[Verdict], blocks: Sequence[Verdict], shadow: bool) -> str:
    if blocks:
        words = "; ".join(v.sentence for v in blocks)
        return f"shadow mode, would be blocked: {words}" if shadow else words
    order = ("warn", "pass", "unknown")
    telling = sorted(verdicts, key=lambda v: order.index(v.outcome))
    return "; ".join(
        f"warning: {v.sentence}" if v.outcome == "warn" else v.sentence for v in telling
    )


def due(inputs: GateInputs, settings: GateSettings, now: float) -> bool:
    """Return whether the published files are known to be past their target age at `now`
    (monotonic)."""
    published = inputs.aged(now, settings.inputs_max_age_s).published
    age = rules.age_now(published, now)
    return published.empty or (age is not None and age > settings.repo_age_target_s)


def replay(record: Mapping[str, Any], inputs: GateInputs, wall: float) -> GateDecision:
    """Recompute a decision from its record and the inputs it names. Raises KeyError or
    TypeError."""
    stated = {**record["candidate"]}
    stated["recent_losses"] = tuple(float(v) for v in stated.get("recent_losses", ()))
    if stated.get("loss") is not None:
        stated["loss"] = float(stated["loss"])
    return decide(
        Candidate(**stated),
        inputs,
        GateSettings(**record["settings"]),
        now=record["now"],
        wall=wall,
    )
