"""Subnet 38's commitment: the read keys of a bucket, as the miner writes them on chain (its
utils/chain.py)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.credentials import find

NAMES = ("R2_ACCOUNT_ID", "R2_READ_ACCESS_KEY_ID", "R2_READ_SECRET_ACCESS_KEY")
"""Names in the miner's `.env.example`; the commitment is their values, concatenated."""


def commitment_of(keys: Mapping[str, str] | None) -> str | None:
    """The commitment formed from these keys."""
    return None if keys is None else "".join(keys[name] for name in NAMES)


def configured(repo: RepoSettings) -> dict[str, str] | None:
    """The configured read keys by name; None if a key is missing or the file is unreadable."""
    try:
        keys = find(repo)
    except RepoError:
        # Opening the repo with these settings reports what is wrong with the file.
        return None
    found = {name: keys.get(name, "").strip() for name in NAMES}
    return found if all(found.values()) else None


def keys_of(commitment: str, form: Sequence[int]) -> dict[str, str] | None:
    """Split a commitment into keys of the lengths in `form`; None if it does not match."""
    if len(commitment) != sum(form) or len(form) != len(NAMES):
        return None
    return dict(zip(NAMES, _fields(commitment, form), strict=True))


def placeholder(commitment: str, form: Sequence[int]) -> bool:
    """Return whether a field of the commitment is all x, its initial value, which validators treat
    as unset."""
    return any(set(field) == {"x"} for field in _fields(commitment, form))


def _fields(commitment: str, form: Sequence[int]) -> list[str]:
    ends = itertools.accumulate(form)
    return [commitment[end - length : end] for length, end in zip(form, ends, strict=True)]
