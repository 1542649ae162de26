"""An S3 bucket as a repo, primarily one on Cloudflare R2. Creating a repo imports boto3; importing
this module does not."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos import s3_client, s3_errors
from miner_guard.uploads.repos.base import (
    BLOCK_BYTES,
    DOCUMENT_LIMIT,
    ObjectInfo,
    RepoError,
    published_state,
    server_time,
)
from miner_guard.validators.facts import Published
from miner_guard.validators.layout import USUAL, Layout

T = TypeVar("T")


class S3Repo:
    """One bucket. Thread-safe, as boto3's clients are."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    @property
    def label(self) -> str:
        return f"bucket:{self._bucket}"

    def state(self, layout: Layout = USUAL) -> Published:
        return published_state(self, time.time(), layout)

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        found: list[ObjectInfo] = []
        more: dict[str, str] = {}
        while True:
            page = self._call(self._client.list_objects_v2, Prefix=prefix, **more)
            now = _server_time(page)
            for item in page.get("Contents", []):
                modified = item["LastModified"].timestamp()
                found.append(
                    ObjectInfo(item["Key"], item["Size"], max(0.0, now - modified), etag_of(item))
                )
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def head(self, key: str) -> ObjectInfo:
        return _entry(key, self._call(self._client.head_object, Key=key))

    def get(self, key: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        answer = self._call(self._client.get_object, Key=key)
        if answer["ContentLength"] > limit:
            answer["Body"].close()
            raise RepoError(f"{key} is {answer['ContentLength']} bytes, over the limit of {limit}")
        data: bytes = self._guarded(answer["Body"].read)
        return data

    def save(self, key: str, path: Path, limit: int) -> None:
        answer = self._call(self._client.get_object, Key=key)
        body, size = answer["Body"], answer["ContentLength"]
        if size > limit:
            body.close()
            raise RepoError(f"{key} is {size} bytes, over the limit of {limit}")
        with path.open("wb") as file:
            while block := self._guarded(lambda: body.read(BLOCK_BYTES)):
                file.write(block)

    def put(self, key: str, data: bytes) -> None:
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        md5 = base64.b64encode(digest).decode()
        self._call(self._client.put_object, Key=key, Body=data, ContentMD5=md5)

    def delete(self, key: str) -> None:
        self._call(self._client.delete_object, Key=key)

    def _call(self, operation: Callable[..., Any], **arguments: Any) -> Any:
        return self._guarded(lambda: operation(Bucket=self._bucket, **arguments))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except RepoError:
            raise
        except Exception as error:
            raise s3_errors.translated(error, self._bucket) from error


def open_s3(settings: RepoSettings, env: Mapping[str, str] | None = None) -> S3Repo:
    """The bucket named in the settings. Raises RepoError if a setting, a key or boto3 is
    missing."""
    return S3Repo(s3_client.connect(settings, env), str(settings.bucket))


def _entry(key: str, answer: Mapping[str, Any]) -> ObjectInfo:
    modified = answer["LastModified"].timestamp()
    return ObjectInfo(
        key, answer["ContentLength"], max(0.0, _server_time(answer) - modified), etag_of(answer)
    )


def _server_time(answer: Mapping[str, Any]) -> float:
    return server_time(answer["ResponseMetadata"]["HTTPHeaders"].get("date"), "the server")


def etag_of(answer: Mapping[str, Any]) -> str | None:
    """The ETag without quotes; None if the response has no ETag."""
    tag = answer.get("ETag")
    return tag.strip('"') if isinstance(tag, str) else None
