"""block_list: config.json names the blocks the miner trained in; an old newest one is rejected.

Subnet 38: the reward code rejects `current_block - max(block_list) > blocks_per_allreduce / 2`, and an empty
list raises there and resets the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from validators.facts import Facts, Network
from validators.limits import Limits
from validators.verdict import Verdict

RULE = "block_list"


def current_block(network: Network, now: float, block_s: float) -> int | None:
    """The block at `now` (monotonic): the one that was read and those due since. None where unknown."""
    if network.block is None:
        return None
    since = 0.0 if network.seen_at is None else max(now - network.seen_at, 0.0)
    return network.block + int(since / block_s)


def reduced(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Of config.json only what this rule reads: its newest block."""
    if config is None:
        return None
    blocks = config.get("block_list")
    if isinstance(blocks, (list, tuple)) and blocks and _are_blocks(blocks):
        return {"block_list": [max(blocks)]}
    return {"block_list": [] if blocks in ([], ()) else None}


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block an empty or missing list, and one whose newest block is older than `block_list_max_age` blocks."""
    limit = limits.block_list_max_age
    if facts.candidate.config is None:
        return Verdict(RULE, "unknown", None, limit, "config.json was not handed in")
    blocks = facts.candidate.config.get("block_list")
    if not isinstance(blocks, (list, tuple)) or not _are_blocks(blocks):
        return Verdict(
            RULE, "block", None, limit, "config.json has no block_list of numbers: validators read it; add it"
        )
    if not blocks:
        words = "block_list is empty: it raises in the validator and resets scores; wait for the chain to be read"
        return Verdict(RULE, "block", 0, limit, words)
    block = current_block(facts.network, facts.now, limits.block_s)
    if block is None:
        why = facts.network.reason or "the block was not read"
        return Verdict(RULE, "unknown", max(blocks), limit, f"the current block is unknown: {why}")
    age = block - max(blocks)
    if limit is not None and age > limit:
        return Verdict(
            RULE, "block", age, limit,
            f"newest block of block_list is {age} blocks old > {limit}: rejected. Is the chain frozen here?",
        )  # fmt: skip
    if limit is not None and age > 0.75 * limit:
        return Verdict(RULE, "warn", age, limit, f"newest block of block_list is {age} blocks old, limit {limit}")
    return Verdict(RULE, "pass", age, limit, f"newest block of block_list is {age} blocks old")


def _are_blocks(values: Sequence[Any]) -> bool:
    return set(map(type, values)) <= {int}
