"""A stand-in for a cloud's metadata server, and for Kubernetes' API."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata(ThreadingHTTPServer):
    """A cloud's metadata server. It answers only requests as its cloud demands them."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.requests: list[tuple[str, str, Mapping[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append((self.command, self.path, dict(self.headers), body))
                asked = f"{self.command} {self.path.partition('?')[0]}"
                words, _, header = outer.answers.get(asked, "").partition(" if ")
                name, _, value = header.partition("=")
                known = bool(words) and (not name or self.headers.get(name) == value)
                self.send_response(200 if known else 404)
                self.end_headers()
                self.wfile.write(words.encode() if known else b"no")

            do_GET = do_PUT = do_PATCH = _answer

            def log_message(self, *_arguments: object) -> None:
                """Quiet."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
