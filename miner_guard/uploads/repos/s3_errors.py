"""Translates boto3's exceptions into sentences: what happened, and what to do."""

from __future__ import annotations

from typing import Any

from miner_guard.uploads.repos.base import (
    Missing,
    RepoError,
    RepoRefused,
    RepoUnreadable,
    first_line,
)

_MISSING = {"404", "NoSuchKey", "NotFound", "NoSuchUpload"}
_REFUSED = {
    "403",
    "AccessDenied",
    "Unauthorized",
    "401",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "Forbidden",
}
_UNREADABLE = {"400", "InvalidRequest", "BadRequest", "InvalidObjectState"}
_FULL = {"QuotaExceeded", "InsufficientCapacity", "InsufficientStorage", "StorageQuotaExceeded"}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_TRANSIENT = {
    "SlowDown",
    "503",
    "500",
    "502",
    "504",
    "429",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "BandwidthLimitExceeded",
    "RequestTimeoutException",
}
_NETWORK = (
    "ConnectionError",
    "HTTPClientError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "EndpointConnectionError",
    "ConnectionClosedError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "ProxyConnectionError",
    "ProtocolError",
)


def translated(error: Exception, bucket: str) -> RepoError:
    """The matching RepoError."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:
        return _of_answer(response, bucket)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & set(_NETWORK) or isinstance(error, (OSError, TimeoutError)):
        return RepoError(f"no response from the storage for bucket {bucket}: {first_line(error)}")
    return RepoError(f"bucket {bucket}: {type(error).__name__}: {first_line(error)}")


def _of_answer(response: dict[str, Any], bucket: str) -> RepoError:
    code = str(response["Error"].get("Code", "unknown"))
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    message = response["Error"].get("Message") or code
    if code == "NoSuchBucket":
        return RepoRefused(
            f"bucket {bucket} does not exist; create it, or correct repo.bucket and repo.endpoint"
        )
    if code in _MISSING:
        return Missing(f"bucket {bucket} has no such object ({code})")
    if code in _SKEWED:
        return RepoError(
            f"the storage rejected the request because this host's clock is wrong ({message}); "
            "sync the clock: timedatectl set-ntp true"
        )
    if code in _UNREADABLE:
        return RepoUnreadable(
            f"no reader can get this object from bucket {bucket} ({code}: {message}); "
            "upload it unencrypted"
        )
    if code in _FULL:
        return RepoError(
            f"the storage for bucket {bucket} is full or over its quota ({code}); free space "
            "or raise the quota"
        )
    if code in _REFUSED or status in ("401", "403"):
        return RepoRefused(
            f"the storage rejected the keys for bucket {bucket} ({code}); check the keys "
            "and their permissions"
        )
    if code == "BadDigest":
        return RepoError(f"bucket {bucket} received different data than was sent ({code})")
    if code in _TRANSIENT or status in ("429", "500", "502", "503", "504"):
        return RepoError(f"storage for bucket {bucket} is busy ({status} {code})")
    if code in ("NotImplemented", "MethodNotAllowed") or status in ("405", "501"):
        return RepoError(f"the storage for bucket {bucket} does not support this request ({code})")
    return RepoError(f"bucket {bucket}: {code}: {message}")
