"""The parts of a multipart upload: their digests, and how the server's responses prove that they
arrived."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.uploads.repos.base import RepoError

ALGORITHM = "CRC32"
"""Checksum sent with each part if the server supports it (AWS S3, R2, MinIO): the server rejects a
corrupted part and stores the checksum. R2 supports CRC32 of parts, not of the whole object:
https://developers.cloudflare.com/r2/api/s3/api/"""


@dataclass(frozen=True)
class UploadPart:
    """One part, as read locally."""

    number: int
    md5: str
    """Hexadecimal digest."""

    crc32: str
    """Base64 of four bytes, big-endian, as used by S3."""

    def etag(self, answer: Mapping[str, Any], key: str) -> str:
        """The ETag in the response to this part's upload. Raises RepoError if the content that
        arrived differs from what was sent.

        An ETag is the md5 of the received bytes, unless the server encrypts with a KMS or customer
        key; then the CRC32 decides.
        """
        seen = etag_of(answer)
        whole = seen == self.md5 or (
            _encrypted(answer) and answer.get("ChecksumCRC32") == self.crc32
        )
        if seen is None or not whole:
            words = (
                f"part {self.number} of {key} arrived as {seen or 'unknown'}, "
                f"but {self.md5} was sent"
            )
            raise RepoError(words, transient=True)
        return seen


def etag_of(answer: Mapping[str, Any]) -> str | None:
    """The ETag without quotes; None if the response has no ETag."""
    tag = answer.get("ETag")
    return tag.strip('"') if isinstance(tag, str) else None


def read(number: int, data: bytes) -> UploadPart:
    """Compute the digests of one part."""
    digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return UploadPart(number, digest, _crc32(data))


def expected_etags(parts: Sequence[UploadPart]) -> list[str]:
    """Possible ETags of the whole object, likeliest first: `<md5 of the parts' md5s>-<count>`."""
    whole = hashlib.md5(
        b"".join(bytes.fromhex(p.md5) for p in parts), usedforsecurity=False
    ).hexdigest()
    return [f"{whole}-{len(parts)}", *(p.md5 for p in parts if len(parts) == 1)]


def expected_crc32(parts: Sequence[UploadPart]) -> str:
    """The whole object's checksum on a server that accepted the parts' CRC32, without the
    `-<count>` that some servers append."""
    return _crc32(b"".join(base64.b64decode(p.crc32) for p in parts))


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _encrypted(answer: Mapping[str, Any]) -> bool:
    return (
        str(answer.get("ServerSideEncryption", "")).startswith("aws:kms")
        or "SSECustomerAlgorithm" in answer
    )
