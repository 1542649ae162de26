"""The audit's verdict: would a validator accept the published files for the epoch that it is
scoring? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.validators import min_inner_step
from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.rules import audit_rules, evaluate_all
from miner_guard.validators.verdict import Verdict


@dataclass(frozen=True)
class Epoch:
    """The epoch that validators score, and the evidence for it."""

    outer_step: int
    why: str


def epoch_scored(
    published: int | None, network: int | None, blocks_since_allreduce: int | None, limits: Limits
) -> Epoch | None:
    """The epoch that validators score: the one before the network's during the first half of the
    blocks after an AllReduce (subnet 38, F:91), otherwise the network's. If the network's is
    unknown, the published one.

    None if both the network's and the published outer step are unknown.
    """
    if network is None:
        why = "as published; the network's outer step is unknown"
        return None if published is None else Epoch(published, why)
    per_allreduce = limits.blocks_per_allreduce
    if per_allreduce is None or blocks_since_allreduce is None:
        return Epoch(
            network, "the network's epoch; the number of blocks since the AllReduce is unknown"
        )
    if blocks_since_allreduce < per_allreduce / 2 and network != 0:
        return Epoch(
            network - 1, f"the previous one: {blocks_since_allreduce} blocks since the AllReduce"
        )
    return Epoch(network, f"the network's: {blocks_since_allreduce} blocks since the AllReduce")


def judge(facts: Facts, limits: Limits) -> tuple[Verdict, ...]:
    """Every rule's verdict on the fetched files."""
    return tuple(evaluate_all(audit_rules(facts, limits), facts, limits))


def detail(
    outcome: str, verdicts: Sequence[Verdict], *, epoch: Epoch, seconds: float, fetched_bytes: int
) -> str:
    """The text after `AUDIT PASSED: `, `AUDIT FAILED: ` or `AUDIT UNKNOWN: `."""
    blocks = [f"{v.rule}: {v.sentence}" for v in verdicts if v.outcome == "block"]
    unknown = [f"{v.rule} unknown ({v.sentence})" for v in verdicts if v.outcome == "unknown"]
    warned = [f"warning: {v.sentence}" for v in verdicts if v.outcome == "warn"]
    cost = f"{fetched_bytes} bytes in {seconds:.1f}s"
    if outcome == "rejected":
        # This state is normal between an AllReduce and the next gradient upload.
        if any(
            v.rule == min_inner_step.RULE and v.outcome == "block" and v.seen == 0 for v in verdicts
        ):
            blocks.append(
                "this is the upload after an AllReduce; the next gradient upload fixes it"
            )
        return f"epoch {epoch.outer_step} ({epoch.why}): {'; '.join(blocks)}"
    passed = sum(v.outcome == "pass" for v in verdicts)
    return "; ".join(
        [
            f"epoch {epoch.outer_step} ({epoch.why}), {passed} rules passed, {cost}",
            *warned,
            *unknown,
        ]
    )


def outcome_of(verdicts: Sequence[Verdict]) -> str:
    """`rejected` if any rule blocks, `unknown` if the files themselves could not be judged, else
    `accepted`."""
    outcomes = {v.rule: v.outcome for v in verdicts}
    if "block" in outcomes.values():
        return "rejected"
    # Without these verdicts the audit cannot conclude that a validator would accept the files.
    needed: tuple[Any, ...] = ("gradients", "repo_age", "min_inner_step", "window")
    return "unknown" if any(outcomes.get(rule) == "unknown" for rule in needed) else "accepted"
