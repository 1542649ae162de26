"""Alerts from a real `miner-guard run` overnight: each is sent once and then resolved; the
heartbeat; a dead target next to a working one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.record.store import RunReader
from tests.servers.webhook import Webhook
from tests.support.present_state import status_of
from tests.support.waiting import until

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
    "ALERTS__PRESET": "overnight",
    "HEALTH__SNAPSHOT_EVERY_S": "1",
    "RESTART__BACKOFF_S": "0.2",
    "HANG__MIN_S": "6",
    "HANG__EXIT_S": "600",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_alerts_arrive_overnight_although_one_webhook_never_answers(
    tmp_path: Path, webhook: Webhook
) -> None:
    script, state = tmp_path / "train.py", tmp_path / "state"
    script.write_text(MINER)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = f"json://127.0.0.1:{silent.getsockname()[1]}/dead,json://{webhook.address}/hook"
        settings = {
            **SETTINGS,
            "ALERTS__URLS": urls,
            "ALERTS__HEARTBEAT_URL": f"http://{webhook.address}/beat",
        }
        program = Path(sys.executable).with_name("miner-guard")
        guard = subprocess.Popen(
            [program, "run", "--no-preflight", "--state-dir", state, "--", sys.executable, script],
            cwd=tmp_path,
            env={**os.environ, **{f"MINER_GUARD_{key}": value for key, value in settings.items()}},
            stdout=subprocess.DEVNULL,
        )
        try:
            until(lambda: webhook.count("RESOLVED miner_exited"), what="the end of what crashed")
            until(lambda: webhook.count("RESOLVED miner_exited") == 2, what="the second end")
            told = [body for body in webhook.bodies if "RESOLVED" not in body["title"]]
            assert sum("MINER EXITED" in body["message"] for body in told) == 2, (
                "each crash once: in between it was over"
            )
            until(lambda: webhook.count("Loss is NaN or Inf"), what="the loss")
            assert webhook.count("Loss is NaN or Inf") == 1, (
                "nine steps without a loss are one message"
            )

            until(lambda: len(webhook.beats) >= 2, what="heartbeats while it progresses")
            steps = status_of(state)["steps"]
            assert steps["p50_s"] < 0.4, "training waits for no webhook"
            (tmp_path / "stand-still").touch()
            until(lambda: webhook.count("HANG DETECTED"), what="the stall")
            beats = len(webhook.beats)
            (tmp_path / "stand-still").unlink()
            until(lambda: webhook.count("RESOLVED hang_detected"), what="the end of the stall")
            until(lambda: len(webhook.beats) > beats, what="heartbeats again")
        finally:
            guard.terminate()
            assert guard.wait(timeout=60) == 0
    events = [hit.name for hit in RunReader(state / "run.db").events()]
    assert events.count("loss_nan") >= 3
