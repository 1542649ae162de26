"""Subnet 38's commitment: the read keys of a bucket, as the miner writes them on chain (utils/chain.py there)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAMES = ("R2_ACCOUNT_ID", "R2_READ_ACCESS_KEY_ID", "R2_READ_SECRET_ACCESS_KEY")
"""As the miner's `.env.example` names them; the commitment is their values, one after another."""


def commitment_of(env: Mapping[str, str]) -> str | None:
    """The commitment that these keys give; None where one is missing."""
    parts = [env.get(name, "").strip() for name in NAMES]
    return "".join(parts) if all(parts) else None


def keys_of(commitment: str, form: Sequence[int]) -> dict[str, str] | None:
    """The keys in a commitment whose parts have the lengths `form`; None where it is not of that form."""
    if len(commitment) != sum(form) or len(form) != len(NAMES):
        return None
    found, start = {}, 0
    for name, length in zip(NAMES, form, strict=True):
        found[name] = commitment[start : start + length]
        start += length
    return found
