"""boto3's client for a bucket: keys, endpoint, deadlines. Importing this module does not import
boto3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miner_guard.config import RepoSettings, optional_deps
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.credentials import find, first

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
    account = first(keys, "R2_ACCOUNT_ID")
    endpoint = settings.endpoint or (
        f"https://{account}.r2.cloudflarestorage.com" if account else None
    )
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
        endpoint_url=endpoint,
        region_name=settings.region,
        aws_access_key_id=access,
        aws_secret_access_key=secret,
        config=Config(
            signature_version="s3v4",
            connect_timeout=_CONNECT_S,
            read_timeout=max(1.0, settings.timeout_s / 2),
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Newer boto3 adds trailers by default, which some S3 servers reject; md5 checks our
            # parts.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # The md5 already verifies what arrived; a sha256 of the body would cost another second
            # of CPU per GiB.
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            tcp_keepalive=True,
        ),
    )
