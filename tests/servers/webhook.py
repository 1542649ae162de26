"""A webhook and a heartbeat endpoint for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """A real HTTP server that keeps what it receives; it refuses the first posts if `refuse` is
    set."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        """Path and body of the accepted requests."""

        self.beats: list[str] = []
        """Paths of GET requests."""

        self.refuse = 0
        self.on_post: Callable[[], None] = lambda: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.on_post()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.refuse -= 1
                self._answer(503 if outer.refuse >= 0 else 200)
                if outer.refuse < 0:
                    outer.posted.append((self.path, body))

            def do_GET(self) -> None:
                outer.beats.append(self.path)
                self._answer(200)

            def _answer(self, code: int) -> None:
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.posted]

    def count(self, words: str) -> int:
        """How many of the titles contain `words`."""
        return sum(words in body["title"] for body in self.bodies)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
