"""Base age: a pseudo-gradient computed against a global state older than the network's is
worthless."""

from __future__ import annotations

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "base_age"


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block if the network is past the outer step that the miner loaded; warn if the miner is
    ahead.

    One step ahead is normal after an AllReduce, until the master publishes the new state and the
    guard probes again.
    """
    ours, network = facts.candidate.base_outer_step, facts.network.outer_step
    if network is None:
        why = facts.network.reason or "the master's repo was not read"
        return Verdict(RULE, "unknown", ours, None, f"the network's outer step is unknown: {why}")
    if ours is None:
        words = "the caller did not pass the outer step of the loaded state"
        return Verdict(RULE, "unknown", None, network, words)
    if ours < network:
        words = (
            f"base outer_step ({ours}) < network ({network}): the gradient was computed "
            "against an old base. Reload the global state"
        )
        return Verdict(RULE, "block", ours, network, words)
    if ours > network + 1:
        words = f"base outer_step ({ours}) > network ({network}): is the right network configured?"
        return Verdict(RULE, "warn", ours, network, words)
    return Verdict(RULE, "pass", ours, network, f"base outer_step {ours}, network {network}")
