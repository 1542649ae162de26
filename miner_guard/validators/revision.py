"""Revision: the tag with the outer and inner step, `{run}.{outer_step}.{inner_step}` on subnet
38."""

from __future__ import annotations

import re

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "revision"


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block a malformed revision, or one whose outer step differs from the candidate's; warn if
    only the inner step differs.

    Upstream writes the root metadata at the end of an upload, with the inner step at that moment,
    so validators accept a revision whose inner steps differ.
    """
    seen, pattern = facts.candidate.revision, limits.revision_pattern
    if seen is None:
        return Verdict(RULE, "unknown", None, pattern, "the caller did not pass a revision")
    if pattern is None:
        return Verdict(RULE, "unknown", seen, None, "the profile defines no revision format")
    match = re.fullmatch(pattern, seen)
    if match is None:
        return Verdict(
            RULE, "block", seen, pattern, f"revision {seen!r} does not match {pattern}; rename it"
        )
    named, candidate = match.groupdict(), facts.candidate
    if "outer" in named and int(named["outer"]) != candidate.outer_step:
        words = (
            f"revision {seen!r} is for outer step {named['outer']}, but the gradient is from "
            f"{candidate.outer_step}"
        )
        return Verdict(RULE, "block", seen, candidate.outer_step, words)
    if "inner" in named and int(named["inner"]) != candidate.inner_step:
        words = (
            f"revision {seen!r} is for inner step {named['inner']}, but the gradient is from "
            f"{candidate.inner_step}"
        )
        return Verdict(RULE, "warn", seen, candidate.inner_step, words)
    return Verdict(RULE, "pass", seen, pattern, f"revision {seen}")
