"""Commitment: the hotkey must commit, on chain, the keys that validators use to read the bucket."""

from __future__ import annotations

import hashlib

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "commitment"


def fingerprint(commitment: str | None) -> str | None:
    """`128:0f3a…`: length and digest, to compare commitments without storing them."""
    if commitment is None:
        return None
    return f"{len(commitment)}:{hashlib.sha256(commitment.encode()).hexdigest()[:16]}"


def judge_tried(facts: Facts, limits: Limits) -> Verdict:
    """Like `judge`, but for an audit that has already opened the bucket with the committed keys."""
    verdict = judge(facts, limits)
    if verdict.outcome != "warn":
        return verdict
    words = "the read keys committed on chain are not the ones in use, but they do open the bucket"
    return Verdict(RULE, "warn", verdict.seen, verdict.limit, words)


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block if the hotkey has committed nothing or the wrong length (subnet 38: exactly 128
    characters).

    Warn if the committed keys differ from those in use: only the audit can try them.
    """
    seen, chars = facts.network.commitment, limits.commitment_chars
    if seen is None:
        why = facts.network.reason or "the chain's reply did not include it"
        return Verdict(RULE, "unknown", None, chars, f"the commitment is unknown: {why}")
    length = int(seen.partition(":")[0])
    if length == 0:
        words = (
            "nothing is committed for this hotkey, so no validator can read the bucket; the "
            "miner commits when it starts"
        )
        return Verdict(RULE, "block", 0, chars, words)
    if chars is not None and length != chars:
        words = (
            f"the commitment has {length} characters, but validators expect exactly {chars}; "
            "commit again"
        )
        return Verdict(RULE, "block", length, chars, words)
    if facts.credentials is None:
        words = f"the commitment has {length} characters; the read keys in use are unknown"
        return Verdict(RULE, "unknown", length, chars, words)
    if facts.credentials != seen:
        words = (
            "the read keys committed on chain are not the ones in use; "
            "`miner-guard audit` tests them"
        )
        return Verdict(RULE, "warn", "other keys", "the keys in use", words)
    return Verdict(
        RULE,
        "pass",
        length,
        chars,
        f"the commitment ({length} characters) contains the keys in use",
    )
