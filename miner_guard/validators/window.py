"""Window: subnets that divide time into windows (Templar) accept uploads only during certain
seconds of each window."""

from __future__ import annotations

from miner_guard.validators.facts import Facts
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import Verdict

RULE = "window"

_NARROW = 0.3
"""Warn when less than this share of the upload interval remains: the upload itself takes time."""


def judge(facts: Facts, limits: Limits) -> Verdict:
    """Block outside `window_put_s` seconds after the start of a window of `window_blocks`
    blocks."""
    network, blocks, put = facts.network, limits.window_blocks, limits.window_put_s
    if blocks is None or put is None:
        return Verdict(
            RULE, "unknown", None, None, "no profile defines when a window accepts uploads"
        )
    if network.block is None:
        why = network.reason or "the block was not read"
        return Verdict(
            RULE, "unknown", None, list(put), f"the position in the window is unknown: {why}"
        )
    elapsed = 0.0 if network.seen_at is None else max(facts.now - network.seen_at, 0.0)
    length = blocks * limits.block_s
    into = ((network.block % blocks) * limits.block_s + elapsed) % length
    seen = round(into, 1)
    if put[0] <= into <= put[1] and put[1] - into < _NARROW * (put[1] - put[0]):
        words = (
            f"{into:.0f}s into the window; uploads count up to {put[1]:.0f}s: will yours arrive "
            f"within {put[1] - into:.0f}s?"
        )
        return Verdict(RULE, "warn", seen, list(put), words)
    if put[0] <= into <= put[1]:
        words = f"{into:.0f}s into the window; uploads count up to {put[1]:.0f}s"
        return Verdict(RULE, "pass", seen, list(put), words)
    early = into < put[0]
    wait = put[0] - into if early else length - into + put[0]
    word = "TOO_EARLY" if early else "TOO_LATE"
    words = (
        f"{into:.0f}s into the window; uploads count from {put[0]:.0f}s to {put[1]:.0f}s: "
        f"{word}. Wait {wait:.0f}s"
    )
    return Verdict(RULE, "block", seen, list(put), words, retry_after_s=round(wait, 1))


def judge_published(facts: Facts, limits: Limits) -> Verdict:
    """Judge whether the gradient of the last complete window was uploaded within the accepted time.

    Compares the object's storage time with the time since the window's last block, which is known
    to within one block. If the result is closer than that to a limit, the verdict is unknown.
    """
    network, blocks, put = facts.network, limits.window_blocks, limits.window_put_s
    if blocks is None or put is None:
        return Verdict(
            RULE, "unknown", None, None, "no profile defines when a window accepts uploads"
        )
    if facts.published.empty:
        return Verdict(RULE, "block", None, list(put), "the last window's gradient is missing")
    if network.block is None or facts.published.age_s is None:
        why = network.reason or facts.published.reason or "the block or the age is unknown"
        return Verdict(RULE, "unknown", None, list(put), f"the upload time is unknown: {why}")
    elapsed = 0.0 if network.seen_at is None else max(facts.now - network.seen_at, 0.0)
    since = (network.block % blocks) * limits.block_s + elapsed
    at = round(since - facts.published.age_s, 1)
    if put[0] <= at <= put[1]:
        close = at > put[1] - limits.block_s
        words = f"uploaded {at:.0f}s after the window ended; uploads count up to {put[1]:.0f}s"
        return Verdict(RULE, "warn" if close else "pass", at, list(put), words)
    if put[0] - limits.block_s <= at <= put[1] + limits.block_s:
        words = f"uploaded about {at:.0f}s after the window ended, within one block time of a limit"
        return Verdict(RULE, "unknown", at, list(put), words)
    word = "TOO_EARLY" if at < put[0] else "TOO_LATE"
    words = (
        f"uploaded {at:.0f}s after the window ended; uploads count from {put[0]:.0f}s to "
        f"{put[1]:.0f}s"
    )
    return Verdict(RULE, "block", at, list(put), f"{words}: {word}")
