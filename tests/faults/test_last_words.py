"""Alerts sent as the guard exits arrive before the exit, and a dead webhook delays it by 10 s at
most."""

from __future__ import annotations

import socket
import time

from tests.faults.guarded import Guarded
from tests.servers.webhook import Webhook
from tests.support import requires

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}


def test_the_crash_loop_is_reported_before_the_guard_ends(
    guarded: Guarded, webhook: Webhook
) -> None:
    url = f"json://{webhook.address}/hook"
    guarded.start(["false"], "--max-restarts", "1", settings={**FAST, "alerts.urls": url})
    assert guarded.processes[0].wait(60) == 75
    assert any("CRASH LOOP" in body["message"] for body in webhook.bodies), webhook.bodies
    assert [e["alert"] for e in guarded.named("alert_sent") if "CRASH LOOP" in e["alert"]]
    guarded.assert_nothing_left()


def test_a_start_that_is_refused_is_reported_before_the_guard_ends(
    guarded: Guarded, webhook: Webhook
) -> None:
    url = f"json://{webhook.address}/hook"
    settings = {**FAST, "alerts.urls": url, "gpu.preflight": "true", "gpu.preflight_wait_s": 0}
    guarded.start(["true"], "--expect-gpus", "64", settings=settings)
    assert guarded.processes[0].wait(120) == 69
    assert any("PREFLIGHT" in body["message"] for body in webhook.bodies), webhook.bodies
    assert not guarded.named("miner_started")
    guarded.assert_nothing_left()


def test_a_dead_webhook_delays_the_end_by_ten_seconds_at_most(guarded: Guarded) -> None:
    requires.module("apprise")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"json://127.0.0.1:{silent.getsockname()[1]}/hook"
        guarded.start(["false"], "--max-restarts", "1", settings={**FAST, "alerts.urls": url})
        guarded.wait_for("crash_loop", seconds=60)
        since = time.monotonic()
        assert guarded.processes[0].wait(60) == 75
        assert time.monotonic() - since < 50, "10 s are meant, of a webhook that never answers"
    unsent = ("not all alerts were sent", "alert not sent")
    degraded = [e["msg"] for e in guarded.named("guard_degraded")]
    assert [words for words in degraded if any(each in words for each in unsent)], degraded
    guarded.assert_nothing_left()
