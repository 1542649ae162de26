"""Bucket: validators derive the bucket's name from the model and the uid, and read no other
bucket."""

from __future__ import annotations

import re

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "bucket"


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block a name that does not match `bucket_pattern`, names a model other than `global_model`,
    or does not contain the chain's uid, zero-padded to three digits.

    Subnet 38: `{global_model_name}-{uid:03d}`.
    """
    seen, pattern, uid = facts.bucket, limits.bucket_pattern, facts.network.uid
    if seen is None:
        return Verdict(
            RULE, "unknown", None, pattern, "the bucket name is unknown; set [repo] bucket"
        )
    if pattern is None:
        return Verdict(
            RULE, "unknown", seen, None, "the profile defines no format for the bucket name"
        )
    match = re.fullmatch(pattern, seen)
    if match is None:
        words = f"bucket {seen!r} does not match {pattern}; no validator reads it"
        return Verdict(RULE, "block", seen, pattern, words)
    named, model = match.groupdict().get("uid"), match.groupdict().get("model")
    if model is not None and limits.global_model is not None and model != limits.global_model:
        words = (
            f"bucket {seen!r} belongs to model {model}, but validators score {limits.global_model} "
            "and look for its buckets"
        )
        return Verdict(RULE, "block", model, limits.global_model, f"{words}; rename the bucket")
    if named is None:
        return Verdict(RULE, "pass", seen, pattern, f"bucket {seen}")
    if uid is None:
        why = facts.network.reason or "the chain was not read"
        words = f"bucket {seen} belongs to uid {int(named)}; ours is unknown: {why}"
        return Verdict(RULE, "unknown", seen, pattern, words)
    if int(named) == uid and named != f"{uid:03d}":
        words = (
            f"bucket {seen!r} writes uid {uid} as {named}, but validators look for {uid:03d}; "
            "rename the bucket"
        )
        return Verdict(RULE, "block", named, f"{uid:03d}", words)
    if int(named) != uid:
        words = (
            f"bucket {seen!r} belongs to uid {int(named)}, but the hotkey's uid is {uid}; "
            "rename the bucket"
        )
        return Verdict(RULE, "block", int(named), uid, words)
    return Verdict(RULE, "pass", seen, pattern, f"bucket {seen} belongs to uid {uid}")
