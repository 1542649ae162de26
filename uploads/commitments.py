"""Subnet 38's commitment: the read keys of a bucket, as the miner writes them on chain
(utils/chain.py there)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miner_guard.config import RepoSettings
from uploads.repos.base import RepoError
from uploads.repos.credentials import find

NAMES = ("R2_ACCOUNT_ID", "R2_READ_ACCESS_KEY_ID", "R2_READ_SECRET_ACCESS_KEY")
"""As the miner's `.env.example` names them; the commitment is their values, one after another."""


def commitment_of(keys: Mapping[str, str] | None) -> str | None:
    """The commitment that these keys give."""
    return None if keys is None else "".join(keys[name] for name in NAMES)


def configured(repo: RepoSettings) -> dict[str, str] | None:
    """The read keys by name, from where the settings say; None where one is missing or the file
    can't be read."""
    try:
        keys = find(repo)
    except RepoError:
        # Anyone who opens the repo with these settings says what is wrong with the file.
        return None
    found = {name: keys.get(name, "").strip() for name in NAMES}
    return found if all(found.values()) else None


def keys_of(commitment: str, form: Sequence[int]) -> dict[str, str] | None:
    """The keys in a commitment whose parts have the lengths `form`; None where it is not of that
    form."""
    if len(commitment) != sum(form) or len(form) != len(NAMES):
        return None
    found, start = {}, 0
    for name, length in zip(NAMES, form, strict=True):
        found[name] = commitment[start : start + length]
        start += length
    return found


def placeholder(commitment: str, form: Sequence[int]) -> bool:
    """Whether a part of it is all x: what validators start with, and take for no credentials."""
    parts, start = [], 0
    for length in form:
        parts.append(commitment[start : start + length])
        start += length
    return any(part and set(part) == {"x"} for part in parts)
