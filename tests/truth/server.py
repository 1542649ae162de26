"""A miner's bucket on a real S3 server (moto): one account, its keys, and a clock that stands
still."""

from __future__ import annotations

import datetime as dt
import email.utils
import re
import threading
from collections.abc import Iterable
from typing import Any

from tests.truth.states import ACCOUNT, NOW, State


class Server:
    """Serves one state at a time: `set` makes the bucket hold exactly that state."""

    def __init__(self) -> None:
        from moto.server import create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Handler(WSGIRequestHandler):
            def date_time_string(self, timestamp: float | None = None) -> str:
                return email.utils.formatdate(NOW, usegmt=True)

            def log(self, *_: Any) -> None:
                pass

        self.state = State()
        self._app = create_backend_app("s3")
        self._server = make_server(
            "127.0.0.1", 0, self._door, threaded=True, request_handler=Handler
        )
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/acct/{{account}}"
        """Contains a placeholder for the account id, which is part of R2's host name."""

        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _door(self, environ: Any, start: Any) -> Iterable[bytes]:
        """Checks accounts and keys, which moto does not do."""
        path = environ["PATH_INFO"]

        def answer(status: str, headers: Any, info: Any = None) -> Any:
            kept = [(n, v) for n, v in headers if n.lower() != "date"]
            now = ("Date", email.utils.formatdate(NOW, usegmt=True))
            return start(status, [*kept, now], info)

        def refuse(status: str, code: str) -> Iterable[bytes]:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
            answer(status, [("Content-Type", "application/xml"), ("Content-Length", len(body))])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        match = re.match(r"/acct/([^/]*)(/.*)$", path)
        if match is None:
            return refuse("404 Not Found", "NoSuchBucket")
        account, path = match.groups()
        key = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        if account != ACCOUNT:
            return refuse("404 Not Found", "NoSuchBucket")
        if key is None or key.group(1) not in self.state.good_keys:
            return refuse("403 Forbidden", "AccessDenied" if key else "InvalidAccessKeyId")
        if any(path.endswith("/" + refused) for refused in self.state.refuse):
            return refuse("400 Bad Request", "InvalidRequest")
        moved = {"PATH_INFO": path, "RAW_URI": path, "REQUEST_URI": path}
        served: Iterable[bytes] = self._app({**environ, **moved}, answer)
        return served

    def set(self, state: State) -> None:
        """Make the bucket hold exactly the state's objects, all as old as the state says."""
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        self.state = state
        backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        for name in list(backend.buckets):
            del backend.buckets[name]
        s3_backends.bucket_accounts.clear()
        backend.create_bucket(state.bucket, "us-east-1")
        when = dt.datetime.fromtimestamp(NOW - state.age, dt.timezone.utc).replace(tzinfo=None)
        for key, data in state.objects.items():
            backend.put_object(state.bucket, key, data).last_modified = when
