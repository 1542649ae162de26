"""metadata.json: the root document that validators start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from validators.facts import Facts
from validators.limits import Limits
from validators.verdict import Verdict

RULE = "metadata"


def reduced(metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Of metadata.json the scalar fields, cut to a size that a decision can carry."""
    if metadata is None:
        return None
    scalars = {str(k)[:40]: v for k, v in metadata.items() if isinstance(v, (str, int, float)) or v is None}
    return {k: v[:80] if isinstance(v, str) else v for k, v in list(scalars.items())[:12]}


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block where a field that validators read is missing, is no step, or names another outer step.

    Another inner step is warned of: upstream writes the one of the upload's end, and it is the one that counts.
    """
    seen, needed = facts.candidate.metadata, list(limits.metadata_fields)
    if seen is None:
        return Verdict(RULE, "unknown", None, needed, "metadata.json was not handed in")
    if missing := [name for name in needed if seen.get(name) is None]:
        return Verdict(RULE, "block", sorted(seen), needed, f"metadata.json lacks {', '.join(missing)}; write them")
    for name in ("outer_step", "inner_step"):
        value = seen.get(name)
        if name in seen and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            return Verdict(RULE, "block", value, "a step", f"metadata.json: {name} is {value!r}, not a step")
    outer = seen.get("outer_step")
    if outer is not None and outer != facts.candidate.outer_step:
        ours = facts.candidate.outer_step
        return Verdict(RULE, "block", outer, ours, f"metadata.json names outer step {outer}, the gradient is of {ours}")
    inner = seen.get("inner_step")
    if inner is not None and inner != facts.candidate.inner_step:
        ours = facts.candidate.inner_step
        return Verdict(RULE, "warn", inner, ours, f"metadata.json names inner step {inner}, the gradient is of {ours}")
    return Verdict(
        RULE, "pass", sorted(seen), needed, f"metadata.json has {', '.join(needed) or 'nothing that is needed'}"
    )
