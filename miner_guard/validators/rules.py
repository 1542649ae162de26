"""Selects the rules that apply: the gate's before an upload, the audit's on the published files.

A rule applies if the caller supplied its subject or the profile has its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from miner_guard.validators import (
    base_age,
    block_list,
    bucket,
    commitment,
    gradients,
    loss,
    metadata,
    min_inner_step,
    repo_age,
    revision,
    swarm,
    window,
)
from miner_guard.validators.facts import Candidate, Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

Judge = Callable[[Facts, Limits], Verdict]
Rule = tuple[str, Judge]

_MAX_REVISION = 80
"""How many characters of a revision a decision keeps."""


def reduced(candidate: Candidate) -> Candidate:
    """Keep only the facts that the rules read, so that a decision's record stays small and replays
    identically."""
    return replace(
        candidate,
        recent_losses=tuple(candidate.recent_losses[-loss.POINTS :]),
        files=gradients.reduced(candidate.files),
        config=block_list.reduced(candidate.config),
        metadata=metadata.reduced(candidate.metadata),
        revision=None if candidate.revision is None else candidate.revision[:_MAX_REVISION],
    )


def gate_rules(facts: Facts, limits: Limits) -> Iterator[Rule]:
    """Rules for a candidate, in reporting order."""
    candidate = facts.candidate
    yield min_inner_step.RULE, min_inner_step.judge
    yield repo_age.RULE, repo_age.judge
    yield base_age.RULE, base_age.judge
    if candidate.loss is not None or candidate.recent_losses:
        yield loss.RULE, loss.judge
    if candidate.files is not None:
        yield gradients.RULE, gradients.judge
    if candidate.config is not None and limits.block_list_max_age is not None:
        yield block_list.RULE, block_list.judge
    if candidate.metadata is not None and limits.metadata_fields:
        yield metadata.RULE, metadata.judge
    if candidate.revision is not None and limits.revision_pattern is not None:
        yield revision.RULE, revision.judge
    yield from _of_the_bucket(facts, limits)
    if limits.commitment_chars is not None and facts.network.reason is None:
        yield commitment.RULE, commitment.judge
    if limits.window_blocks is not None:
        yield window.RULE, window.judge


def audit_rules(facts: Facts, limits: Limits) -> Iterator[Rule]:
    """Rules for the published files; `facts.candidate` holds what the audit fetched."""
    if limits.window_blocks is not None:
        yield window.RULE, window.judge_published
    else:
        yield min_inner_step.RULE, min_inner_step.judge_published
        yield repo_age.RULE, repo_age.judge_published
    yield gradients.RULE, gradients.judge
    if limits.block_list_max_age is not None:
        yield block_list.RULE, block_list.judge
    if limits.metadata_fields:
        yield metadata.RULE, metadata.judge_published
    yield from _of_the_bucket(facts, limits)
    if limits.commitment_chars is not None and facts.network.reason is None:
        yield commitment.RULE, commitment.judge_tried if facts.tried else commitment.judge
    if limits.alive_timeout_s is not None:
        yield swarm.ALIVE, swarm.judge_alive
    if limits.allreduce_share is not None:
        yield swarm.ALLREDUCE, swarm.judge_allreduce


def _of_the_bucket(facts: Facts, limits: Limits) -> Iterator[Rule]:
    if limits.bucket_pattern is not None and facts.bucket is not None:
        yield bucket.RULE, bucket.judge


def evaluate_all(rules: Iterator[Rule], facts: Facts, limits: Limits) -> list[Verdict]:
    """Every rule's verdict; an error inside a rule becomes a block that reports it."""
    return [evaluate(name, judge, facts, limits) for name, judge in rules]


def evaluate(name: str, judge: Judge, facts: Facts, limits: Limits) -> Verdict:
    """One rule's verdict. Never raises."""
    try:
        return judge(facts, limits)
    except Exception as error:  # noqa: BLE001 -- a defect in one rule must not let an upload pass unjudged
        return rule_error(name, error)


def rule_error(name: str, error: Exception) -> Verdict:
    """The verdict for a rule that raised: a block."""
    words = f"the rule {name} failed: {type(error).__name__}: {error}"
    return Verdict(name, "block", None, None, f"{words[:180]}; the upload is blocked")
