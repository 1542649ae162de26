"""Repo age: how old the published files are, by the storage's clock."""

from __future__ import annotations

from miner_guard.validators.facts import Facts, Network, Published
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "repo_age"


def age_now(published: Published, now: float) -> float | None:
    """Age in seconds at `now` (monotonic): the age when read, plus the time since then. None if
    unknown."""
    if published.age_s is None:
        return None
    since = 0.0 if published.seen_at is None else max(now - published.seen_at, 0.0)
    return published.age_s + since


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block within `min_upload_interval_s` of the last upload; never block because of age, since an
    upload fixes that."""
    published, minimum = facts.published, limits.min_upload_interval_s
    age = age_now(published, facts.now)
    if published.empty:
        words = "the repo is empty: the first upload is due"
        return Verdict(RULE, "pass", None, limits.repo_age_limit_s, words)
    if age is None:
        return Verdict(
            RULE, "unknown", None, limits.repo_age_limit_s, f"repo age unknown: {published.reason}"
        )
    seen = round(age, 1)
    if age < minimum:
        words = (
            f"repo age {age:.0f}s < minimum interval {minimum:.0f}s: too soon. Wait "
            f"{minimum - age:.0f}s"
        )
        return Verdict(RULE, "block", seen, minimum, words, retry_after_s=round(minimum - age, 1))
    if age > limits.repo_age_limit_s:
        words = f"repo age {age:.0f}s > limit {limits.repo_age_limit_s:.0f}s: stale, upload now"
        return Verdict(RULE, "warn", seen, limits.repo_age_limit_s, words)
    if age > limits.repo_age_target_s:
        words = f"repo age {age:.0f}s > target {limits.repo_age_target_s:.0f}s: an upload is due"
        return Verdict(RULE, "pass", seen, limits.repo_age_target_s, words)
    words = f"repo age {age:.0f}s (keep < {limits.repo_age_target_s:.0f}s)"
    return Verdict(RULE, "pass", seen, limits.repo_age_target_s, words)


def raises(network: Network, limits: Limits) -> int:
    """The largest number of AllReduces that could have failed since the last success.

    Subnet 38 (F:87, F:424): the master starts an AllReduce once `blocks_per_allreduce` blocks have
    passed, and retries a failed one after a tenth of that number. 0 before that, or if the number
    of blocks is unknown.
    """
    since, between = network.blocks_since_allreduce, limits.blocks_per_allreduce
    if since is None or between is None or since < between:
        return 0
    return 1 + (since - between) * 10 // between


def judge_published(facts: Facts, limits: Limits) -> Verdict:
    """The validators' verdict on the age of the published gradients (subnet 38: zero score from
    4800 s)."""
    published = facts.published
    age = age_now(published, facts.now)
    limit = limits.validator_repo_age_s or limits.repo_age_limit_s
    if published.empty:
        words = "nothing is published: there is no gradients file; upload one"
        return Verdict(RULE, "block", None, limit, words)
    if age is None:
        return Verdict(RULE, "unknown", None, limit, f"repo age unknown: {published.reason}")
    seen = round(age, 1)
    raised = limit + raises(facts.network, limits) * (limits.validator_repo_age_raise_s or 0.0)
    if limit <= age < raised:
        words = (
            f"gradients are {age:.0f}s old >= {limit:.0f}s, but the AllReduce is overdue: each "
            f"failed AllReduce raises the limit by {limits.validator_repo_age_raise_s:.0f}s (at "
            f"most {raised:.0f}s by now), and no public data shows how many failed; upload now"
        )
        return Verdict(RULE, "unknown", seen, raised, words)
    if age >= limit:
        known = limits.validator_repo_age_s is not None
        why = (
            "they score zero"
            if known
            else "over the guard's limit (no profile says at what age validators score zero)"
        )
        words = f"gradients are {age:.0f}s old >= {limit:.0f}s: {why}; upload now"
        return Verdict(RULE, "block", seen, limit, words)
    if age > limits.repo_age_limit_s:
        own = limits.repo_age_limit_s
        return Verdict(RULE, "warn", seen, own, f"gradients are {age:.0f}s old (keep < {own:.0f}s)")
    return Verdict(RULE, "pass", seen, limit, f"gradients are {age:.0f}s old")
