"""An S3 bucket as a repo, primarily one on Cloudflare R2. Creating a repo imports boto3; importing
this module does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miner_guard.config import RepoSettings, optional_deps
from miner_guard.uploads.repos.base import (
    BLOCK_BYTES,
    TIMEOUT_S,
    Damaged,
    Missing,
    ObjectInfo,
    Repo,
    RepoError,
    RepoRefused,
    check_size,
    first_line,
    server_time,
)
from miner_guard.uploads.repos.credentials import address, find, first


class S3Repo(Repo):
    """One bucket. Thread-safe, as boto3's clients are."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    @property
    def label(self) -> str:
        return f"bucket:{self._bucket}"

    def head(self, key: str) -> ObjectInfo:
        answer = self._call(self._client.head_object, Key=key)
        now = server_time(answer["ResponseMetadata"]["HTTPHeaders"].get("date"), "the server")
        age_s = max(0.0, now - answer["LastModified"].timestamp())
        tag = answer.get("ETag")
        return ObjectInfo(key, answer["ContentLength"], age_s, tag.strip('"') if tag else None)

    def read(self, key: str, limit: int) -> Iterator[bytes]:
        answer = self._call(self._client.get_object, Key=key)
        with contextlib.closing(answer["Body"]) as body:
            check_size(key, answer["ContentLength"], limit)
            while block := self._guarded(lambda: body.read(BLOCK_BYTES)):
                yield block

    def _call(self, operation: Callable[..., Any], **arguments: Any) -> Any:
        return self._guarded(lambda: operation(Bucket=self._bucket, **arguments))

    def _translated(self, error: Exception) -> RepoError:
        """What happened and what to do, from boto3's exception."""
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return self._of_answer(response)
        from botocore.exceptions import ConnectionError as Unconnected
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        if isinstance(error, (Unconnected, HTTPClientError, IncompleteReadError, OSError)):
            return RepoError(
                f"no response from the storage for bucket {self._bucket}: {first_line(error)}"
            )
        return RepoError(f"bucket {self._bucket}: {type(error).__name__}: {first_line(error)}")

    def _of_answer(self, response: dict[str, Any]) -> RepoError:
        code = str(response["Error"].get("Code", "unknown"))
        status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        message = response["Error"].get("Message") or code
        if code == "NoSuchBucket":
            return RepoRefused(
                f"bucket {self._bucket} does not exist; create it, or correct repo.bucket and "
                "repo.endpoint"
            )
        if code in _MISSING:
            return Missing(f"bucket {self._bucket} has no such object ({code})")
        if code in _SKEWED:
            return RepoError(
                f"the storage rejected the request because this host's clock is wrong ({message}); "
                "sync the clock: timedatectl set-ntp true"
            )
        if code in _UNREADABLE:
            return Damaged(
                f"no reader can get this object from bucket {self._bucket} ({code}: {message}); "
                "upload it unencrypted"
            )
        if code in _REFUSED or status in _REFUSED:
            return RepoRefused(
                f"the storage rejected the keys for bucket {self._bucket} ({code}); check the keys "
                "and their permissions"
            )
        if code in _BUSY or status in _BUSY:
            return RepoError(f"storage for bucket {self._bucket} is busy ({status} {code})")
        return RepoError(f"bucket {self._bucket}: {code}: {message}")


def open_s3(settings: RepoSettings, env: Mapping[str, str] | None = None) -> S3Repo:
    """The bucket named in the settings. Raises RepoError if a setting, a key or boto3 is
    missing."""
    return S3Repo(connect(settings, env), str(settings.bucket))


_CONNECT_S = 5.0


def connect(settings: RepoSettings, env: Mapping[str, str] | None = None) -> Any:
    """boto3's client for the bucket in the settings; it connects on its first request and never
    retries on its own. Raises RepoError for missing settings or keys."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise RepoError(f"S3 needs boto3: {optional_deps.install('s3')} ({error})") from error
    if not settings.bucket:
        raise RepoError("repo.bucket is not set; set it to the bucket that the miner publishes to")
    keys = find(settings, env)
    access = first(keys, "R2_WRITE_ACCESS_KEY_ID", "R2_READ_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID")
    secret = first(
        keys, "R2_WRITE_SECRET_ACCESS_KEY", "R2_READ_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"
    )
    if access is None or secret is None:
        where = (
            "the environment"
            if settings.credentials == "env"
            else (settings.credentials_file or ".env")
        )
        raise RepoError(
            f"no keys for bucket {settings.bucket}: {where} has no R2_WRITE_ACCESS_KEY_ID and "
            "R2_WRITE_SECRET_ACCESS_KEY (or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )
    return boto3.client(
        "s3",
        endpoint_url=address(settings, keys),
        region_name=first(keys, "AWS_REGION", "AWS_DEFAULT_REGION") or "auto",
        aws_access_key_id=access,
        aws_secret_access_key=secret,
        config=Config(
            signature_version="s3v4",
            connect_timeout=_CONNECT_S,
            read_timeout=TIMEOUT_S / 2,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Newer boto3 adds trailers by default, which some S3 servers reject.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # Only the demo writes, and reads back what arrived; a sha256 of the body would cost a
            # second of CPU per GiB.
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            tcp_keepalive=True,
        ),
    )


_MISSING = {"404", "NoSuchKey", "NotFound"}
_UNREADABLE = {"400", "InvalidRequest", "BadRequest", "InvalidObjectState"}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_BUSY = {"429", "500", "502", "503", "504"}
"""HTTP statuses; a retry may succeed."""
