"""What validators expect of a miner besides its files: that it responds, and that it takes part in
AllReduces.

The published files show neither, so these rules only warn: a bad result costs part of the score
or the next AllReduce, not the upload.
"""

from __future__ import annotations

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

ALIVE = "is_alive"
ALLREDUCE = "allreduce"


def judge_alive(facts: Facts, limits: Limits) -> Verdict:
    """Judge whether the axon that the chain names responds to this host within the validators'
    timeout. The epoch in its response stays unknown: the axon returns it only to validators' signed
    requests.
    """
    seen, limit = facts.axon, limits.alive_timeout_s
    if seen is None or seen.address is None:
        why = "the chain was not read" if seen is None else seen.reason
        return Verdict(ALIVE, "unknown", None, limit, f"the miner's axon is unknown: {why}")
    if seen.address == "":
        words = (
            "the chain lists no axon for this uid, so validators can't invite the miner; start the "
            "axon"
        )
        return Verdict(ALIVE, "warn", "", limit, words)
    if seen.seconds is None:
        words = (
            f"the axon {seen.address} does not respond to this host ({seen.reason}). If validators "
            "get no response, they leave the miner out of AllReduces. Open the port; behind NAT, "
            "test from another host"
        )
        return Verdict(ALIVE, "warn", None, limit, words)
    words = f"the axon {seen.address} responds in {seen.seconds:.2f}s"
    if limit is not None and seen.seconds > limit:
        return Verdict(
            ALIVE,
            "warn",
            seen.seconds,
            limit,
            f"{words}, but validators wait only {limit:.1f}s. Is the host overloaded?",
        )
    return Verdict(ALIVE, "pass", seen.seconds, limit, words)


def judge_allreduce(facts: Facts, limits: Limits) -> Verdict:
    """Judge how the miner's last AllReduce ended, according to its own log."""
    share, seen = limits.allreduce_share, facts.allreduce
    worth = "" if share is None else f" (AllReduces make up {share:.0%} of the score)"
    if seen is None:
        words = f"no AllReduce in the miner's log since the guard started{worth}"
        return Verdict(ALLREDUCE, "unknown", None, None, words)
    if seen.error is not None:
        words = f"the last AllReduce failed here: {seen.error}{worth}; see the preceding log lines"
        return Verdict(ALLREDUCE, "warn", seen.error, None, words)
    return Verdict(ALLREDUCE, "pass", "finished", None, "the last AllReduce finished here")
