"""Minimum inner step: validators reject a pseudo-gradient from too few inner steps."""

from __future__ import annotations

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "min_inner_step"


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block below `min_inner_step` (source 004: 50). The sentence is a contract.

    Archives are exempt: the upload after an AllReduce starts at inner step 0, and the miner's own
    reload needs it.
    """
    seen, required = facts.candidate.inner_step, minimum(limits, facts.published.inner_step)
    if seen < required and facts.candidate.kind == "archive":
        sentence = f"archive at inner_step {seen}: exempt from the minimum of {required}"
        return Verdict(RULE, "pass", seen, required, sentence)
    if seen < required:
        return Verdict(
            RULE,
            "block",
            seen,
            required,
            (
                f"inner_step ({seen}) < minimum ({required}). Validators will reject this! "
                "Waiting for more training steps..."
            ),
            retry_after_steps=required - seen,
            note=_both_minima(required, facts.published.inner_step, limits),
        )
    return Verdict(RULE, "pass", seen, required, f"inner_step {seen} >= minimum {required}")


def minimum(limits: Limits, published_inner_step: int | None) -> int:
    """The operator's minimum, which may differ while the published upload is an AllReduce's
    archive."""
    if published_inner_step == 0 and limits.min_inner_step_after_allreduce is not None:
        return limits.min_inner_step_after_allreduce
    return limits.min_inner_step


def _both_minima(required: int, published_inner_step: int | None, limits: Limits) -> str | None:
    """Details kept out of the sentence, whose wording is a contract; None if there are no
    details."""
    accepted = limits.validator_min_inner_step
    if accepted is None or accepted >= required:
        return None
    words = (
        f"this version of the validators accepts inner step {accepted} and above; "
        f"your minimum is {required}"
    )
    if published_inner_step == 0:
        words += (
            "; the published archive scores nothing in the meantime "
            "([gate] min_inner_step_after_allreduce)"
        )
    return words


def judge_published(facts: Facts, limits: Limits) -> Verdict:
    """The validators' verdict on the published inner step (subnet 38 rejects 0)."""
    seen, required = facts.published.inner_step, limits.validator_min_inner_step
    if seen is None:
        words = "the published inner step is unknown: metadata.json does not contain one"
        return Verdict(RULE, "unknown", None, required, words)
    if required is not None and 0 <= seen < required:
        words = (
            f"published inner_step {seen} < {required}: validators reject it; publish "
            "again after more inner steps"
        )
        return Verdict(RULE, "block", seen, required, words)
    if facts.candidate.kind == "archive":
        words = (
            f"this is the archive after an outer step (inner_step {seen}), not yet a gradient; the "
            "next upload will be one"
        )
        return Verdict(RULE, "warn", seen, limits.min_inner_step, words)
    if seen < limits.min_inner_step:
        words = f"published inner_step {seen} < minimum {limits.min_inner_step}"
        return Verdict(RULE, "warn", seen, limits.min_inner_step, words)
    return Verdict(RULE, "pass", seen, required, f"published inner_step {seen}")
