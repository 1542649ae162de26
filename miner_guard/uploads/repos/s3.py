"""An S3 bucket as a repo, primarily one on Cloudflare R2. Creating a repo imports boto3; importing
this module does not.

Staging is an incomplete multipart upload; committing completes it, which S3 does atomically per
object and without moving a byte. Small JSON documents wait in the publisher's journal and are
written on commit. So the switch to the next revision is a few short requests, whatever the size.
(Staging under other keys and copying would make the server move every byte during the switch.)
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos import s3_client, s3_errors, s3_parts
from miner_guard.uploads.repos.base import (
    BLOCK_BYTES,
    CONFIG,
    DOCUMENT_LIMIT,
    GRADIENTS,
    METADATA,
    Differs,
    Missing,
    Notes,
    ObjectInfo,
    Progress,
    RepoError,
    StagedObject,
    check_size,
    digest_of,
    published_state,
    server_time,
)
from miner_guard.uploads.repos.s3_parts import UploadPart, etag_of
from miner_guard.validators.facts import Published
from miner_guard.validators.layout import USUAL, Layout

T = TypeVar("T")

_PART_BYTES = 16 * 1024 * 1024
"""R2 and S3 accept parts of 5 MiB or more; R2 requires all but the last to have the same size."""

_DOCUMENT_BYTES = 64 * 1024
"""JSON up to this size waits in the ticket, and so in the publisher's journal, until a single
request makes it visible: for a few hundred bytes, the three requests of a multipart upload cost
more than they protect."""

_MAX_PARTS = 10_000
_MD5 = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class _Upload:
    """A multipart upload in progress."""

    id: str
    part_bytes: int
    checked: bool
    """Each part carries a CRC32 that the server verifies."""


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

    def stage(self, key: str, path: Path, progress: Progress, notes: Notes) -> StagedObject:
        size = path.stat().st_size
        if size == 0:
            raise RepoError(f"{path} is empty; there is nothing to publish")
        if size <= _DOCUMENT_BYTES and key.endswith(".json"):
            return _held(key, path, progress)
        part_bytes = max(_PART_BYTES, math.ceil(size / _MAX_PARTS))
        upload, there = self._begun(key, notes, part_bytes)
        if upload is None:
            upload = self._begin(key, part_bytes)
            notes["multipart"] = asdict(upload)

        def send(number: int) -> tuple[UploadPart, str]:
            with open(path, "rb") as file:
                file.seek((number - 1) * part_bytes)
                data = file.read(part_bytes)
            part = s3_parts.read(number, data)
            etag = (
                part.md5 if there.get(number) == part.md5 else self._send(key, upload, part, data)
            )
            progress(len(data))
            return part, etag

        with ThreadPoolExecutor(s3_client.PARALLEL, thread_name_prefix="part") as pool:
            sent = list(pool.map(send, range(1, math.ceil(size / part_bytes) + 1)))
        parts = [part for part, _ in sent]
        etags = (
            s3_parts.expected_etags(parts) if all(part.md5 == etag for part, etag in sent) else []
        )
        notes_for_later = {
            "upload_id": upload.id,
            "parts": [_completing(upload, part, etag) for part, etag in sent],
            "etags": etags,
            "crc32": s3_parts.expected_crc32(parts) if upload.checked else None,
            "path": str(path.resolve()),
        }
        return StagedObject(key, size, notes_for_later, etags[0] if etags else None)

    def _begin(self, key: str, part_bytes: int) -> _Upload:
        begin = self._client.create_multipart_upload
        try:
            answer = self._call(begin, Key=key, ChecksumAlgorithm=s3_parts.ALGORITHM)
            return _Upload(answer["UploadId"], part_bytes, checked=True)
        except RepoError as error:
            if error.transient:
                raise
        # A server without checksum support rejects the first call with its own error; if this call
        # fails too, its error is the real cause.
        return _Upload(self._call(begin, Key=key)["UploadId"], part_bytes, checked=False)

    def _begun(
        self, key: str, notes: Notes, part_bytes: int
    ) -> tuple[_Upload | None, dict[int, str]]:
        """The upload that an earlier attempt began, and the ETags of the parts that arrived, by
        part number."""
        if (
            "multipart" not in notes
            or (upload := _Upload(**notes["multipart"])).part_bytes != part_bytes
        ):
            return None, {}
        there: dict[int, str] = {}
        more: dict[str, Any] = {}
        try:
            while True:
                page = self._call(self._client.list_parts, Key=key, UploadId=upload.id, **more)
                there.update({p["PartNumber"]: etag_of(p) or "" for p in page.get("Parts", [])})
                if not page.get("IsTruncated"):
                    return upload, there
                more = {"PartNumberMarker": page["NextPartNumberMarker"]}
        except RepoError as error:
            # The upload is gone, or this server or these keys do not list parts. It cannot be
            # resumed, so start another; `sweep` removes the old one later.
            if error.transient:
                raise
            return None, {}

    def _send(self, key: str, upload: _Upload, part: UploadPart, data: bytes) -> str:
        answer = self._call(
            self._client.upload_part,
            Key=key,
            UploadId=upload.id,
            PartNumber=part.number,
            Body=data,
            **({"ChecksumCRC32": part.crc32} if upload.checked else {}),
        )
        return part.etag(answer, key)

    def commit(self, tickets: Sequence[StagedObject], revision: str) -> None:
        """Make the first object visible before all others, because a server can take a long time to
        assemble a large one. As in every repo, the last object becomes visible last."""
        with ThreadPoolExecutor(s3_client.PARALLEL, thread_name_prefix="show") as pool:
            for together in (tickets[:1], tickets[1:-1], tickets[1:][-1:]):
                list(pool.map(self._show, together))

    def _show(self, ticket: StagedObject) -> None:
        if _DOCUMENT in ticket.data:
            self.put(ticket.key, _document(ticket))
            return
        try:
            self._call(
                self._client.complete_multipart_upload,
                Key=ticket.key,
                UploadId=ticket.data["upload_id"],
                MultipartUpload={"Parts": ticket.data["parts"]},
            )
        except Missing as error:
            # Either the dead publisher completed this upload, or it is gone. The object itself
            # shows which.
            if not self._arrived(ticket):
                raise RepoError(
                    f"the staged upload of {ticket.key} is gone; publish again"
                ) from error

    def _arrived(self, ticket: StagedObject) -> bool:
        try:
            self.confirm(ticket)
        except RepoError as error:
            if error.transient:
                raise
            return False
        return True

    def abort(self, tickets: Sequence[StagedObject]) -> None:
        for ticket in tickets:
            if _DOCUMENT not in ticket.data:
                self._abort(ticket.key, ticket.data["upload_id"])

    def _abort(self, key: str, upload_id: str) -> None:
        try:
            self._call(self._client.abort_multipart_upload, Key=key, UploadId=upload_id)
        except Missing:
            return

    def sweep(self) -> int:
        try:
            uploads = self._call(self._client.list_multipart_uploads).get("Uploads", [])
        except (Missing, s3_errors.Unsupported):
            return 0
        stale = [u for u in uploads if _ours(u["Key"])]
        for upload in stale:
            self._abort(upload["Key"], upload["UploadId"])
        return len(stale)

    def confirm(self, ticket: StagedObject) -> ObjectInfo:
        entry = self.head(ticket.key)
        check_size(entry, ticket)
        if entry.checksum not in ticket.data["etags"] and not self._same(ticket, entry.checksum):
            raise Differs(
                f"{ticket.key} reads back with different content than was staged; publish again"
            )
        return entry

    def _same(self, ticket: StagedObject, etag: str | None) -> bool:
        """Compare contents on a server whose ETag is not one of the expected digests."""
        if _DOCUMENT in ticket.data:
            return self.get(ticket.key) == _document(ticket)
        return self._same_parts(ticket) or self._same_content(ticket, etag)

    def _same_parts(self, ticket: StagedObject) -> bool:
        """Compare checksums on a server that encrypts: its ETags are not digests of the content."""
        expected = ticket.data.get("crc32")
        if expected is None:
            return False
        answer = self._call(self._client.head_object, Key=ticket.key, ChecksumMode="ENABLED")
        return bool(str(answer.get("ChecksumCRC32", "")).partition("-")[0] == expected)

    def _same_content(self, ticket: StagedObject, etag: str | None) -> bool:
        """Compare on a server whose ETag is not the digest of the parts' digests: rclone returns
        the md5 of the whole file."""
        path = Path(ticket.data["path"])
        try:
            with open(path, "rb") as file:
                if etag is not None and _MD5.fullmatch(etag):
                    return digest_of(file.read, "md5") == etag
                body = self._call(self._client.get_object, Key=ticket.key)["Body"]
                return digest_of(file.read) == self._guarded(lambda: digest_of(body.read))
        except FileNotFoundError as error:
            raise RepoError(f"cannot compare {ticket.key} with {path}: the file is gone") from error

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


_DOCUMENT = "document"


def _held(key: str, path: Path, progress: Progress) -> StagedObject:
    """Stage a document inside its ticket."""
    data = path.read_bytes()
    progress(len(data))
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    held = {_DOCUMENT: base64.b64encode(data).decode(), "etags": [md5], "path": str(path.resolve())}
    return StagedObject(key, len(data), held, md5)


def _document(ticket: StagedObject) -> bytes:
    return base64.b64decode(ticket.data[_DOCUMENT])


def _completing(upload: _Upload, part: UploadPart, etag: str) -> dict[str, Any]:
    checksum = {"ChecksumCRC32": part.crc32} if upload.checked else {}
    return {"PartNumber": part.number, "ETag": f'"{etag}"', **checksum}


def _entry(key: str, answer: Mapping[str, Any]) -> ObjectInfo:
    modified = answer["LastModified"].timestamp()
    return ObjectInfo(
        key, answer["ContentLength"], max(0.0, _server_time(answer) - modified), etag_of(answer)
    )


def _server_time(answer: Mapping[str, Any]) -> float:
    return server_time(answer["ResponseMetadata"]["HTTPHeaders"].get("date"), "the server")


def _ours(key: str) -> bool:
    folder, _, name = key.rpartition("/")
    published = name in (GRADIENTS, CONFIG, METADATA)
    return key == METADATA or (
        published and USUAL.outer_step_of(f"{folder}/{GRADIENTS}") is not None
    )
