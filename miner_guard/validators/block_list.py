"""block_list: the blocks in which the miner trained, listed in config.json. Validators reject an
upload whose newest block is too old.

Subnet 38: the reward code rejects `current_block - max(block_list) > blocks_per_allreduce / 2`; it
raises on a list that is empty or has no maximum, and the validator resets the scores. The validator
then draws one of the blocks, seeded with the miner's uid, and advances a random number generator by
that block; the generator accepts only integers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from miner_guard.validators.facts import Facts, Network
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "block_list"

_NEVER_OLD = 10**15


def age_limit(limits: Limits) -> float | None:
    """Maximum age of the newest block, in blocks: half the number between AllReduces (R:320)."""
    if limits.blocks_per_allreduce is not None and limits.block_list_max_age is not None:
        return limits.blocks_per_allreduce / 2
    return limits.block_list_max_age


def current_block(network: Network, now: float, block_s: float) -> int | None:
    """The block at `now` (monotonic): the last one read plus those due since. None if unknown."""
    if network.block is None:
        return None
    since = 0.0 if network.seen_at is None else max(now - network.seen_at, 0.0)
    return network.block + int(since / block_s)


def reduced(config: Mapping[str, Any] | None, uid: int | None = None) -> Mapping[str, Any] | None:
    """Keep only what this rule reads from config.json: a one-element list with the newest block;
    empty if the list is empty, None if validators cannot use it."""
    if config is None:
        return None
    blocks = config.get("block_list")
    if not isinstance(blocks, (list, tuple)):
        return {"block_list": None}
    if not blocks:
        return {"block_list": []}
    return {"block_list": None if (newest := _newest(blocks, uid)) is None else [newest]}


def _newest(blocks: Sequence[Any], uid: int | None) -> int | None:
    """The newest block; None if validators cannot compare the blocks, or cannot use the one they
    draw."""
    if not set(map(type, blocks)) <= {int, float, bool}:
        return None
    drawn = blocks if uid is None else random.Random(uid).sample(list(blocks), 1)
    if not all(isinstance(block, int) for block in drawn):
        return None
    newest = max(blocks)
    if isinstance(newest, int):
        return int(newest)
    # A NaN or infinite block never counts as too old in a validator.
    return math.floor(newest) if math.isfinite(newest) else _NEVER_OLD


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block an empty or missing list, and one whose newest block is older than `block_list_max_age`
    blocks. An archive's list may be empty."""
    limit = age_limit(limits)
    if facts.candidate.config is None:
        return Verdict(RULE, "unknown", None, limit, "the caller did not pass config.json")
    known = reduced(facts.candidate.config, facts.network.uid)
    blocks = None if known is None else known["block_list"]
    if blocks is None:
        words = (
            "config.json has no block_list of integers, from which validators draw a block; add one"
        )
        return Verdict(RULE, "block", None, limit, words)
    if not blocks and facts.candidate.kind == "archive":
        # The miner clears its list at an AllReduce, and reloads from this upload.
        words = "block_list is empty, as in every archive after an AllReduce"
        return Verdict(RULE, "pass", 0, limit, words)
    if not blocks:
        words = (
            "block_list is empty, so validators raise an error and reset scores; wait "
            "until the miner has read the chain"
        )
        return Verdict(RULE, "block", 0, limit, words)
    block = current_block(facts.network, facts.now, limits.block_s)
    if block is None:
        why = facts.network.reason or "the block was not read"
        return Verdict(RULE, "unknown", max(blocks), limit, f"the current block is unknown: {why}")
    age = block - max(blocks)
    old = f"newest block in block_list is {age} blocks old"
    if limit is not None and age > limit:
        words = f"{old} (limit {limit:.0f}); validators reject it. Has this node stalled?"
        return Verdict(RULE, "block", age, limit, words)
    if limit is not None and age > 0.75 * limit:
        return Verdict(RULE, "warn", age, limit, f"{old} (limit {limit:.0f})")
    return Verdict(RULE, "pass", age, limit, old)
