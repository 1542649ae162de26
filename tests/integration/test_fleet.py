"""`status --host`: guards on other machines, the worst first, from their ports."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.cli.main import run
from tests.support.http_port import Port

TOKEN = "token-of-the-test"
HUNG = {"life": "hung", "colour": "red", "cause": "rank 2 in data for 912s"}
WELL = {"life": "training", "colour": "green", "earning": "yes", "cause": "step 80 of 90"}


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with `code` and the address of another of its paths."""

    asked: list[tuple[str, str | None]]
    code: int

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.code)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Port]]:
    monkeypatch.setenv("MINER_GUARD_HTTP__TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    opened = {name: Port(tmp_path / name, TOKEN) for name in ("well", "hung")}
    opened["well"].status(name="one", verdict=WELL)
    opened["hung"].status(name="two", verdict=HUNG)
    yield opened
    for port in opened.values():
        port.close()


def test_the_worst_comes_first_and_one_that_cannot_be_read_before_all(
    ports: dict[str, Port], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [f"127.0.0.1:{ports[name].number}" for name in ("well", "hung")]
    assert run(["status", "--host", ",".join([*hosts, "127.0.0.1:1"])]) == 3
    unread, hung, well = capsys.readouterr().out.splitlines()
    assert unread.startswith("127.0.0.1:1 ")
    assert "UNREAD" in unread
    assert "refused" in unread
    assert hung.split()[:2] == [hosts[1], "two"]
    assert "HUNG" in hung
    assert well.split()[:2] == [hosts[0], "one"]
    assert "EARNING" in well

    assert run(["status", "--check", "--host", hosts[0]]) == 0
    assert capsys.readouterr().out == ""
    assert run(["status", "--check", "--host", hosts[0], "--host", hosts[1]]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(hosts[1])

    assert run(["status", "--json", "--host", ",".join(hosts)]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [hosts[1], hosts[0]]


def test_a_wrong_token_and_a_wrong_host_say_what_to_do(
    ports: dict[str, Port], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINER_GUARD_HTTP__TOKEN", "another-token-of-the-test")
    assert run(["status", "--host", f"127.0.0.1:{ports['well'].number}"]) == 3
    assert "set MINER_GUARD_HTTP__TOKEN" in capsys.readouterr().out
    assert run(["status", "--host", "http://miner-1/"]) == 64
    assert "'http://miner-1/' is not HOST or HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "words"), [(302, "it answers 302"), (200, "it does not answer with a guard's state")]
)
def test_the_token_is_not_sent_where_a_server_redirects(
    capsys: pytest.CaptureFixture[str], ports: dict[str, Port], code: int, words: str
) -> None:
    asked: list[tuple[str, str | None]] = []
    kind = type("Answering", (Server,), {"asked": asked, "code": code})
    server = http.server.HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert run(["status", "--host", f"127.0.0.1:{server.server_port}"]) == 3
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == [("/status", f"Bearer {TOKEN}")]
    assert words in capsys.readouterr().out
