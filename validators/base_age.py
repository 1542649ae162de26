"""Base age: a pseudo-gradient against a global state that the network has left behind is worth
nothing."""

from __future__ import annotations

from validators.facts import Facts
from validators.limits import Limits
from validators.verdict import Verdict

RULE = "base_age"


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block where the network's outer step is beyond the one that ours was loaded from; warn of the
    opposite.

    One ahead is how it is after an AllReduce, until the master has published it and the guard has
    looked.
    """
    ours, network = facts.candidate.base_outer_step, facts.network.outer_step
    if network is None:
        why = facts.network.reason or "the master's repo was not read"
        return Verdict(RULE, "unknown", ours, None, f"the network's outer step is unknown: {why}")
    if ours is None:
        return Verdict(
            RULE,
            "unknown",
            None,
            network,
            "the outer step that the state was loaded from was not handed in",
        )
    if ours < network:
        return Verdict(
            RULE,
            "block",
            ours,
            network,
            (
                f"base outer_step ({ours}) < network ({network}): a gradient against an old "
                "base. Reload the global state"
            ),
        )
    if ours > network + 1:
        words = f"base outer_step ({ours}) > network ({network}): is the right network looked at?"
        return Verdict(RULE, "warn", ours, network, words)
    return Verdict(RULE, "pass", ours, network, f"base outer_step {ours}, network {network}")
