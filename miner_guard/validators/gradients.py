"""Judges the gradients file by what `miner_guard.validators.inspect_gradients` reported.

This rule runs inside rank 0 and never opens the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "gradients"

ALL_ZERO = "all values are zero"
"""An error for a gradient, normal for an archive: after an outer step the local weights equal the
global ones."""

_PROBLEMS_KEPT = 3
_SHAPES: Mapping[Any, str] = {
    True: ", with the model's shapes",
    False: "; shapes not checked: `guard.diagnose` has not recorded the model's",
}


def reduced(report: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Keep only the parts of an inspection's report that this rule reads, small enough to fit in a
    decision."""
    if report is None:
        return None
    problems = [str(p)[:160] for p in report.get("problems") or ()]
    kept = {
        "size_bytes": report.get("size_bytes"),
        "params": report.get("params"),
        "problems": problems[:_PROBLEMS_KEPT],
    }
    if report.get("warnings"):
        kept["warnings"] = [str(report["warnings"][0])[:160]]
    for name in ("shapes_known", "values_read"):
        if report.get(name) is not None:
            kept[name] = bool(report[name])
    if report.get("reason") is not None:
        kept["reason"] = str(report["reason"])[:160]
    return kept


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block a file with problems or of an implausible size; unknown without an inspection.

    An archive's values may all be zero.
    """
    report = facts.candidate.files
    if report is None:
        return Verdict(RULE, "unknown", None, None, "gradients.pt was not inspected")
    size = report.get("size_bytes")
    if report.get("reason") is not None:
        return Verdict(
            RULE, "unknown", size, None, f"gradients.pt could not be inspected: {report['reason']}"
        )
    minimum, maximum = limits.gradients_min_bytes, limits.gradients_max_bytes
    problems = list(report.get("problems") or ())
    if problems == [ALL_ZERO] and facts.candidate.kind == "archive":
        words = f"gradients.pt: {ALL_ZERO}, as in every archive after an outer step"
        return Verdict(RULE, "pass", size, maximum, words)
    if problems:
        words = f"gradients.pt: {'; '.join(map(str, problems[:_PROBLEMS_KEPT]))}"
        return Verdict(RULE, "block", size, None, words)
    if minimum is not None and size is not None and size < minimum:
        words = f"gradients.pt is {size} bytes, below the plausible minimum of {minimum}"
        return Verdict(RULE, "block", size, minimum, words)
    if maximum is not None and size is not None and size > maximum:
        words = f"gradients.pt is {size} bytes, above the plausible maximum of {maximum}"
        return Verdict(RULE, "block", size, maximum, words)
    if not report.get("params"):
        return Verdict(RULE, "block", 0, 1, "gradients.pt contains no gradients")
    if warnings := list(report.get("warnings") or ()):
        words = f"gradients.pt: {'; '.join(map(str, warnings[:_PROBLEMS_KEPT]))}"
        return Verdict(RULE, "warn", size, maximum, words)
    read = "all finite" if report.get("values_read", True) else "values not read"
    words = f"gradients.pt: {report['params']} parameters, {read}"
    return Verdict(RULE, "pass", size, maximum, words + _SHAPES.get(report.get("shapes_known"), ""))
