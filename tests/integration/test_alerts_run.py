"""Alerts of a real `miner-guard run` overnight: told once, then resolved; the heartbeat; a dead target beside."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from miner_guard.logquery import Query, search
from miner_guard.statedir import read_json
from tests import needs
from tests.waiting import until

MINER = """
import os, pathlib, time
import miner_guard

guard = miner_guard.init()
starts = pathlib.Path("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
for step in range(1, 100_000):
    time.sleep(0.1)
    guard.step(outer_step=1, inner_step=step, loss=float("nan") if step in (20, 21, 22) else 3.0)
    if step == 30 and len(starts.read_text()) < 3:
        os._exit(1)
    while pathlib.Path("stand-still").exists():
        time.sleep(0.1)
"""
SETTINGS = {
    "ALERTS__PRESET": "overnight", "ALERTS__HEARTBEAT_EVERY_S": "1", "RESTART__BACKOFF_S": "0.2", "HANG__MIN_S": "6",
    "HANG__EXIT_S": "600",
}  # fmt: skip


class Phone:
    """A webhook and a heartbeat's address; keeps the titles, and the time of each beat."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.beats: list[float] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.titles.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["title"])
                self.send_response(200)
                self.end_headers()

            def do_GET(self) -> None:
                outer.beats.append(time.monotonic())
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def count(self, words: str) -> int:
        return sum(words in title for title in self.titles)


@pytest.fixture
def phone() -> Iterator[Phone]:
    needs.module("apprise")
    made = Phone()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_night_with_crashes_a_nan_and_a_stall_beside_a_webhook_that_never_answers(
    tmp_path: Path, phone: Phone
) -> None:
    script, state = tmp_path / "train.py", tmp_path / "state"
    script.write_text(MINER)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = f"json://127.0.0.1:{silent.getsockname()[1]}/dead,json://{phone.address}/hook"
        settings = {**SETTINGS, "ALERTS__URLS": urls, "ALERTS__HEARTBEAT_URL": f"http://{phone.address}/beat"}
        program = Path(sys.executable).with_name("miner-guard")
        guard = subprocess.Popen(
            [program, "run", "--no-preflight", "--state-dir", state, "--", sys.executable, script], cwd=tmp_path,
            env={**os.environ, **{f"MINER_GUARD_{key}": value for key, value in settings.items()}},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until(lambda: phone.count("RESOLVED: miner_exited"), what="the end of what crashed")
            until(lambda: phone.count("RESOLVED: miner_exited") == 2, what="the second end")
            assert phone.count("ERROR: miner_exited") == 2, "each crash once: in between it was over"
            until(lambda: phone.count("CRITICAL: loss_nan"), what="the loss")
            assert phone.count("loss_nan") == 1, "nine steps without a loss are one message"

            until(lambda: len(phone.beats) >= 2, what="heartbeats while it progresses")
            steps = (read_json(state / "status.json") or {})["steps"]
            assert steps["p50_s"] < 0.4, "training waits for no webhook"
            (tmp_path / "stand-still").touch()
            until(lambda: phone.count("CRITICAL: hang_detected"), what="the stall")
            beats = len(phone.beats)
            (tmp_path / "stand-still").unlink()
            until(lambda: phone.count("RESOLVED: hang_detected"), what="the end of the stall")
            until(lambda: len(phone.beats) > beats, what="heartbeats again")
        finally:
            guard.terminate()
            assert guard.wait(timeout=60) == 0
    events = [hit.event for hit in search(state / "guard.jsonl", Query())]
    assert events.count("loss_nan") >= 3
