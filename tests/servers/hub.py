"""A stub of the Hugging Face Hub: the endpoints that repo_info, create_repo, upload_folder and
create_tag need.

Enough for huggingface_hub 0.25 to 2.4. Large files go through LFS (set HF_HUB_DISABLE_XET=1).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs

TOKEN = "hf_" + "t" * 30


@dataclass
class Commit:
    id: str
    title: str
    date: str
    files: dict[str, str]
    """The sha256 of each file, keyed by path."""


@dataclass
class HubState:
    """The stub's whole state; tests read it, and set the faults in it."""

    repos: dict[str, list[Commit]] = field(default_factory=dict)
    """Commits of each repo, newest first."""

    tags: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    refuse: int | None = None
    """Status code to send in response to every request."""

    half_close: bool = False
    """Whether responses break off halfway through their body."""

    shift_s: float = 0.0
    """Seconds by which the Hub's clock is ahead of this host's."""

    def new_commit(self, repo: str, title: str, files: dict[str, str]) -> Commit:
        number = len(self.repos.get(repo, []))
        when = datetime.now(timezone.utc) + timedelta(seconds=self.shift_s)
        date = when.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        commit = Commit(hashlib.sha1(f"{repo} {number}".encode()).hexdigest(), title, date, files)
        self.repos.setdefault(repo, []).insert(0, commit)
        return commit

    def store(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.contents[digest] = data
        return digest


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ClassVar[HubState]
    base: ClassVar[str]

    def log_message(self, *_: Any) -> None:
        return

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate((timestamp or time.time()) + self.state.shift_s, usegmt=True)

    def _any(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        if self.state.refuse is not None:
            self._fail(self.state.refuse, "Refused", "as the test wants it")
            return
        if self.headers.get("Authorization") not in (f"Bearer {TOKEN}", None) or (
            self.command == "POST" and self.headers.get("Authorization") is None
        ):
            self._fail(401, "Unauthorized", "Invalid credentials")
            return
        for pattern, handle in _ROUTES:
            if match := re.fullmatch(pattern, path):
                handle(self, match, body)
                return
        self._fail(404, "RepoNotFound", f"the stub has no {self.command} {path}")

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, document: Any, status: int = 200, **headers: str) -> None:
        self.send_bytes(json.dumps(document).encode(), status, **headers)

    def send_bytes(self, data: bytes, status: int = 200, **headers: str) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send(data, status, headers)

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if self.state.half_close else data)
        self.close_connection = self.close_connection or self.state.half_close

    def _fail(self, status: int, code: str, message: str) -> None:
        self.answer({"error": message}, status, X_Error_Code=code, X_Error_Message=message)

    # one method per endpoint

    def create(self, _match: re.Match[str], body: bytes) -> None:
        document = json.loads(body)
        repo = f"{document.get('organization') or 'me'}/{document['name']}"
        url = f"{self.base}/{repo}"
        if repo in self.state.repos:
            self.answer(
                {"error": "exists", "url": url},
                409,
                X_Error_Message="You already created this model repo",
            )
            return
        self.state.new_commit(repo, "initial commit", {})
        self.answer({"url": url, "name": repo, "id": "x"})

    def whoami(self, _match: re.Match[str], _body: bytes) -> None:
        self.answer(
            {"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        )

    def validate(self, _match: re.Match[str], _body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def info(self, match: re.Match[str], _body: bytes) -> None:
        repo = match["repo"]
        if repo not in self.state.repos:
            self._fail(404, "RepoNotFound", "Repository not found")
            return
        head = self._at(repo, match["revision"] or "main")
        if head is None:
            self._fail(404, "RevisionNotFound", "Revision not found")
            return
        self.answer(
            {
                "_id": "x",
                "id": repo,
                "modelId": repo,
                "sha": head.id,
                "lastModified": head.date,
                "createdAt": head.date,
                "private": False,
                "disabled": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": name} for name in head.files],
            }
        )

    def paths_info(self, match: re.Match[str], body: bytes) -> None:
        head = self._at(match["repo"], match["revision"])
        paths = parse_qs(body.decode())["paths"]
        found = [path for path in paths if head is not None and path in head.files]
        self.answer([self._file(match["repo"], path, head) for path in found if head is not None])

    def _file(self, repo: str, path: str, head: Commit) -> dict[str, Any]:
        commits = self.state.repos[repo]
        last = head
        for commit in commits[commits.index(head) :]:
            if commit.files.get(path) != head.files[path]:
                break
            last = commit
        described = {"id": last.id, "title": last.title, "date": last.date}
        size = len(self.state.contents[head.files[path]])
        return {
            "type": "file",
            "path": path,
            "oid": head.files[path],
            "size": size,
            "lastCommit": described,
        }

    def _at(self, repo: str, revision: str) -> Commit | None:
        commits = self.state.repos.get(repo) or []
        paths = self.state.tags.get(revision, revision)
        return next((c for c in commits if paths in ("main", c.id)), None)

    def preupload(self, match: re.Match[str], body: bytes) -> None:
        modes = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(".pt") else "regular",
                "shouldIgnore": False,
            }
            for f in json.loads(body)["files"]
        ]
        self.answer({"files": modes, "commitOid": self.state.repos[match["repo"]][0].id})

    def lfs_batch(self, _match: re.Match[str], body: bytes) -> None:
        objects = []
        for paths in json.loads(body)["objects"]:
            entry: dict[str, Any] = {"oid": paths["oid"], "size": paths["size"]}
            if paths["oid"] not in self.state.contents:
                href = f"{self.base}/_lfs/{paths['oid']}"
                entry["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, match: re.Match[str], body: bytes) -> None:
        digest = self.state.store(body)
        self.state.large.add(digest)
        self.send_bytes(b"", 200 if digest == match["oid"] else 422)

    def commit(self, match: re.Match[str], body: bytes) -> None:
        repo = match["repo"]
        files, title = dict(self.state.repos[repo][0].files), ""
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                title = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = self.state.store(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                files[value["path"]] = value["oid"]
            elif operation["key"] == "deletedFile":
                files.pop(value["path"], None)
        made = self.state.new_commit(repo, title, files)
        url = f"{self.base}/{repo}/commit/{made.id}"
        self.answer({"success": True, "commitOid": made.id, "commitUrl": url, "hookOutput": ""})

    def tag(self, match: re.Match[str], body: bytes) -> None:
        if self.command == "DELETE":
            self.state.tags.pop(match["revision"], None)
            self.answer({})
            return
        name = json.loads(body)["tag"]
        if name in self.state.tags:
            self._fail(409, "TagExists", "Tag reference exists already")
            return
        revision = match["revision"]
        self.state.tags[name] = (
            self.state.repos[match["repo"]][0].id if revision == "main" else revision
        )
        self.answer({})

    def resolve(self, match: re.Match[str], _body: bytes) -> None:
        commit = self._at(match["repo"], match["revision"])
        digest = commit.files.get(match["path"]) if commit else None
        if digest is None:
            self._fail(404, "EntryNotFound", "Entry not found")
            return
        data, named = self.state.contents[digest], {"X_Repo_Commit": commit.id}
        if digest in self.state.large:
            # A different host, as with the Hub's real storage.
            elsewhere = f"{self.base.replace('127.0.0.1', 'localhost')}/_cdn/{digest}?signature=x"
            linked = {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(data)), **named}
            self.send_bytes(b"", 302, Location=elsewhere, ETag=f'"{digest}"', **linked)
        else:
            self.send_bytes(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', **named)

    def cdn(self, match: re.Match[str], _body: bytes) -> None:
        """The storage behind signed URLs: it accepts one authorization, not two, and has its own
        ETags."""
        if "Authorization" in self.headers:
            self._fail(400, "InvalidArgument", "Only one auth mechanism allowed")
            return
        self.send_bytes(self.state.contents[match["oid"]], ETag='"of-the-storage-7"')


_REPO = r"/api/models/(?P<repo>[^/]+/[^/]+)"
_ROUTES = (
    (r"/api/repos/create", _Handler.create),
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/validate-yaml", _Handler.validate),
    (_REPO + r"(/revision/(?P<revision>.+))?", _Handler.info),
    (_REPO + r"/preupload/.+", _Handler.preupload),
    (_REPO + r"/paths-info/(?P<revision>.+)", _Handler.paths_info),
    (_REPO + r"/commit/.+", _Handler.commit),
    (_REPO + r"/tag/(?P<revision>.+)", _Handler.tag),
    (r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"/_lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    (r"/_cdn/(?P<oid>[0-9a-f]{64})", _Handler.cdn),
    (r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
)


@contextlib.contextmanager
def stub() -> Iterator[tuple[str, HubState]]:
    """A Hub in a thread of this process; yields its endpoint and its state."""
    state = HubState()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.base = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield handler.base, state
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()
