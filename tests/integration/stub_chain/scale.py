"""SCALE, the chain's encoding, limited to what the stub needs."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable


def compact(number: int) -> bytes:
    if number < 1 << 6:
        return bytes([number << 2])
    if number < 1 << 14:
        return struct.pack("<H", (number << 2) | 1)
    if number < 1 << 30:
        return struct.pack("<I", (number << 2) | 2)
    data = number.to_bytes((number.bit_length() + 7) // 8, "little")
    return bytes([((len(data) - 4) << 2) | 3]) + data


def u16(number: int) -> bytes:
    return struct.pack("<H", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str) -> bytes:
    data = value.encode()
    return compact(len(data)) + data


def vector(items: Iterable[bytes]) -> bytes:
    found = list(items)
    return compact(len(found)) + b"".join(found)


def option(item: bytes | None) -> bytes:
    return b"\0" if item is None else b"\1" + item


def twox(data: bytes, words: int) -> bytes:
    """Substrate's xxHash: `words` of 64 bits, one per seed."""
    import xxhash

    return b"".join(xxhash.xxh64(data, seed=seed).digest()[::-1] for seed in range(words))


def blake2_concat(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest() + data


def storage_key(pallet: str, entry: str, *parts: bytes) -> str:
    return "0x" + (twox(pallet.encode(), 2) + twox(entry.encode(), 2) + b"".join(parts)).hex()
