"""Parts on their way to S3: no corrupted part goes unnoticed, whatever the server reports about
what it received."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from miner_guard.uploads.journal import Journal, journal_path
from miner_guard.uploads.publisher import Publisher, Retry
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import Repo
from miner_guard.uploads.repos.s3 import S3Repo
from tests.servers import s3
from tests.servers.revisions import inner_step_of, revision

GRADIENTS = "epoch-3/gradients.pt"
BYTES = 40 * 1024 * 1024
"""Three parts."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Repo, s3.Faults]]:
    s3.keys(monkeypatch)
    with s3.bucket("llama-4b-ws-4-007") as (settings, faults):
        repo = open_repo(settings)
        assert isinstance(repo, S3Repo)
        yield repo, faults


def publish(repo: Repo, folder: Path) -> list[str]:
    """Publish a revision of inner step 50; returns the publisher's output."""
    lines: list[str] = []
    journal = Journal(journal_path(folder, repo.label))
    Publisher(repo, journal, lines.append, Retry(backoff_s=0.02)).publish(
        revision(folder, 50, BYTES)
    )
    return lines


def published(repo: Repo) -> int:
    return inner_step_of(repo.get(GRADIENTS, 2 * BYTES))


@pytest.fixture
def damaged(server: tuple[S3Repo, s3.Faults]) -> list[Any]:
    """The request whose body is corrupted on the way: the first part."""
    requests: list[Any] = []

    def damage(request: Any, **_: Any) -> None:
        if not requests:
            requests.append(request)
            request.body = b"x" + request.body.read()[1:]

    server[0]._client.meta.events.register("before-send.s3.UploadPart", damage)
    return requests


def test_a_corrupted_part_is_resent_before_it_becomes_visible(
    server: tuple[S3Repo, s3.Faults], damaged: list[Any], tmp_path: Path
) -> None:
    repo, _ = server
    lines = publish(repo, tmp_path)
    assert any("arrived as" in line and "trying again" in line for line in lines)
    assert published(repo) == 50
    assert len(damaged) == 1


def test_a_server_without_checksums_gets_uploads_without_them(
    server: tuple[S3Repo, s3.Faults], tmp_path: Path
) -> None:
    repo, faults = server
    faults.unknown_headers = ("HTTP_X_AMZ_CHECKSUM_ALGORITHM", "HTTP_X_AMZ_CHECKSUM_CRC32")
    assert publish(repo, tmp_path) == []
    assert published(repo) == 50


def test_a_bucket_that_encrypts_is_read_back_by_its_checksums(
    server: tuple[S3Repo, s3.Faults], tmp_path: Path
) -> None:
    """The ETag of an object encrypted with a KMS key is not an md5, so each part looked damaged."""
    repo, faults = server
    _encrypt(repo._client)
    faults.requests.clear()
    assert publish(repo, tmp_path) == []
    assert not any(
        r.startswith("GET") and f"{GRADIENTS}?" in r and "uploadId" not in r
        for r in faults.requests
    )
    assert published(repo) == 50


def test_a_corrupted_part_is_resent_even_if_the_bucket_encrypts(
    server: tuple[S3Repo, s3.Faults], damaged: list[Any], tmp_path: Path
) -> None:
    repo, _ = server
    _encrypt(repo._client)
    lines = publish(repo, tmp_path)
    assert any("arrived as" in line and "trying again" in line for line in lines)
    assert published(repo) == 50
    assert len(damaged) == 1


def _encrypt(client: Any) -> None:
    """Make the server answer as S3 with KMS does: with ETags that are not digests, and with the
    CRC32 of what it received."""
    received: dict[tuple[str, int], str] = {}

    def receive(request: Any, **_: Any) -> None:
        body = request.body if isinstance(request.body, bytes) else request.body.read()
        asked = urlsplit(request.url)
        part = asked.path.split("/", 2)[2], int(parse_qs(asked.query)["partNumber"][0])
        received[part] = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
        request.body = body

    def note(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        context["part"] = params["Key"], params["PartNumber"]

    def record(parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        parsed.update(ServerSideEncryption="aws:kms", ChecksumCRC32=received[context["part"]])

    def disguise(parsed: dict[str, Any], **_: Any) -> None:
        parsed["ETag"] = parsed["ETag"][::-1]

    def undisguise(params: dict[str, Any], **_: Any) -> None:
        for part in params["MultipartUpload"]["Parts"]:
            part["ETag"] = part["ETag"][::-1]

    events = client.meta.events
    events.register("before-send.s3.UploadPart", receive)
    events.register("provide-client-params.s3.UploadPart", note)
    events.register("provide-client-params.s3.CompleteMultipartUpload", undisguise)
    events.register("after-call.s3.UploadPart", record)
    for operation in ("UploadPart", "HeadObject"):
        events.register(f"after-call.s3.{operation}", disguise)
    events.register(
        "after-call.s3.ListParts",
        lambda parsed, **_: [disguise(part) for part in parsed.get("Parts", [])],
    )


def test_a_body_is_not_hashed_again_for_its_signature(
    server: tuple[S3Repo, s3.Faults], tmp_path: Path
) -> None:
    repo, _ = server
    sent: list[Any] = []
    for operation in ("UploadPart", "PutObject"):
        repo._client.meta.events.register(
            f"before-send.s3.{operation}", lambda request, **_: sent.append(request)
        )
    source = revision(tmp_path, 50).folder
    repo.stage("epoch-3/gradients.pt", source / "gradients.pt", lambda _n: None, {})
    small_file = (source / "config.json").read_bytes()
    repo.put("metadata.json", small_file)
    part, small = (
        {name.lower(): value for name, value in request.headers.items()} for request in sent
    )
    assert {part["x-amz-content-sha256"], small["x-amz-content-sha256"]} == {b"UNSIGNED-PAYLOAD"}
    # The server must refuse corruption that it detects at once; for a part, the response shows what
    # arrived.
    assert small["content-md5"] == base64.b64encode(hashlib.md5(small_file).digest())
    assert b"content-md5" in small["authorization"]
    assert "content-md5" not in part
