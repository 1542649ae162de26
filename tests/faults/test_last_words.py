"""Alerts sent as the guard exits arrive before the exit, and a dead webhook delays it by 10 s at
most. Of a guard that was killed, the next one tells."""

from __future__ import annotations

import os
import signal
import socket
import time

from tests.faults.guarded import Guarded, until
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


def test_a_start_that_is_refused_is_reported_before_the_guard_ends(
    guarded: Guarded, webhook: Webhook
) -> None:
    url = f"json://{webhook.address}/hook"
    settings = {**FAST, "alerts.urls": url, "gpu.preflight": "true", "gpu.preflight_wait_s": 0}
    guarded.start(["true"], "--expect-gpus", "64", settings=settings)
    assert guarded.processes[0].wait(120) == 69
    assert any("PREFLIGHT" in body["message"] for body in webhook.bodies), webhook.bodies
    assert not guarded.named("miner_started")


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


def test_a_killed_guard_is_reported_by_the_next_one_and_a_repetition_is_held_back(
    guarded: Guarded, webhook: Webhook
) -> None:
    """The next guard logged it before it had anything that sends alerts: nobody was told."""
    settings = {**FAST, "alerts.urls": f"json://{webhook.address}/hook"}
    guarded.start(["sleep", "600"], settings=settings)
    guarded.wait_for("miner_started")

    def alerts() -> list[str]:
        return [body["message"] for body in webhook.bodies if "GUARD KILLED" in body["message"]]

    os.kill(guarded.guard_pid, signal.SIGKILL)
    guarded.wait_for("guard_killed")
    until(lambda: len(alerts()) == 1, 60, guarded.tail)
    assert "the miner kept running" in alerts()[0]
    os.kill(guarded.guard_pid, signal.SIGKILL)
    guarded.wait_for("guard_killed", 2)
    # The keeper is killed too: another run of the guard tells, perhaps on another day.
    os.kill(guarded.keeper_pid, signal.SIGKILL)
    guarded.processes[0].wait(60)
    guarded.assert_nothing_left(5)
    guarded.start(["sleep", "600"], settings=settings)
    guarded.wait_for("guard_killed", 3)
    until(lambda: len(alerts()) == 2, 60, guarded.tail)
    assert "did not shut down cleanly" in alerts()[1]
    assert guarded.stop() == 0
