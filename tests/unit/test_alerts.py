"""Alerts: what they report, how often, and what resolves them; a slow delivery delays nothing
else."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.cli.main import run
from miner_guard.config import AlertSettings, Config
from miner_guard.rank.layout import StepRecord
from miner_guard.record.events import Event, degraded, event
from miner_guard.show import alerts
from miner_guard.show.alerts import Alert, AlertPolicy, AlertsMonitor, send_test
from miner_guard.system.clock import FakeClock, SystemClock
from tests.servers.webhook import Webhook
from tests.support import requires
from tests.support.contexts import JobsAtOnce, context
from tests.support.waiting import until

HANG = event("hang_detected", "critical", "HANG DETECTED: rank 2 in data for 912s")
FAILED = event("upload_failed", "error", "UPLOAD FAILED: 403")
VERIFIED = event("upload_succeeded", "info", "UPLOAD VERIFIED: tag 5.56.51 read back")
SPIKE = event("loss_spike", "warning", "LOSS SPIKE: 9 at step 1 (median 3, limit 4)")


def _sent(policy: AlertPolicy, *events: Event) -> list[Alert]:
    return [alert for event in events for alert in policy.observe(event)]


def _policy(**settings: Any) -> tuple[AlertPolicy, FakeClock]:
    clock = FakeClock()
    return AlertPolicy(AlertSettings(**settings), clock), clock


def _incident(label: str) -> Event:
    return event("incident", "error", f"INCIDENT {label}: c Fix: f", label=label)


def test_errors_are_reported_and_warnings_are_not_nor_an_alert_about_alerts() -> None:
    policy, _ = _policy()
    own = degraded("alert not sent: target 1 (json)", part="alerts").at("critical")
    sent = _sent(policy, HANG, SPIKE, VERIFIED, own)
    assert [(alert.event, alert.body) for alert in sent] == [
        ("hang_detected", "HANG DETECTED: rank 2 in data for 912s")
    ]


def test_the_overnight_set_adds_losses_and_failed_saves_but_no_requested_stop() -> None:
    policy, _ = _policy(preset="overnight")
    asked = event("miner_exited", "info", "MINER EXITED: as asked", how="as asked")
    stale = event("checkpoint", "warning", "CHECKPOINT STALE: 2 h old", detail="2 h old")
    assert [a.event for a in _sent(policy, SPIKE, asked, stale)] == ["loss_spike", "checkpoint"]


def test_the_same_alert_waits_for_its_cooldown_and_says_how_many_were_held_back() -> None:
    policy, clock = _policy(cooldown_s=900)
    assert len(_sent(policy, *[HANG] * 10)) == 1
    clock.advance(901)
    (again,) = _sent(policy, HANG)
    assert "(9 more of these were suppressed)" in again.body
    assert len(_sent(policy, *map(_incident, ("oom", "nccl", "oom")))) == 2


def test_a_resolved_alert_is_reported_once_and_may_recur() -> None:
    policy, _ = _policy()
    sent = _sent(policy, FAILED, VERIFIED, VERIFIED)
    assert [(a.event, a.resolves) for a in sent] == [
        ("upload_failed", False),
        ("upload_failed", True),
    ]
    assert len(_sent(policy, FAILED)) == 1, "a second failure after the end is news"
    _sent(policy, HANG)
    assert [(a.event, a.resolves) for a in policy.progressed()] == [("hang_detected", True)]
    assert list(policy.progressed()) == []


def test_an_event_at_info_ends_the_problem_of_its_name_on_the_same_gpu() -> None:
    policy, _ = _policy()
    broken = [event("gpu_fault", "error", f"GPU FAULT: {n}", gpu=n) for n in (1, 2)]
    back = event("gpu_fault", "info", "GPU RECOVERED: 2", gpu=2)
    (ended,) = [alert for alert in _sent(policy, *broken, back) if alert.resolves]
    assert ended.body == "GPU RECOVERED: 2\nwas: GPU FAULT: 2"


def test_what_is_remembered_is_bounded() -> None:
    policy, _ = _policy()
    _sent(policy, *(_incident(str(number)) for number in range(2000)))
    assert len(policy._open) <= 256


def _now(monitor: AlertsMonitor, *events: Event) -> None:
    """Let the monitor gather the events and send its message."""
    for each in events:
        monitor.on_event(each)
    monitor.on_tick(math.inf, {})


def _url(webhook: Webhook) -> str:
    return f"json://{webhook.address}/planted-secret-path"


def _monitor(
    tmp_path: Path, settings: AlertSettings, status: dict[str, Any] | None = None
) -> tuple[AlertsMonitor, list[Event]]:
    emitted: list[Event] = []
    around = context(
        tmp_path,
        config=Config(alerts=settings),
        clock=SystemClock(),
        emit=emitted.append,
        jobs=JobsAtOnce(),
        status=lambda: status or {},
    )
    return AlertsMonitor(around), emitted


def test_an_alert_arrives_after_a_refusal_and_names_miner_state_and_cause(
    tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "RETRIES_S", (0.1, 0.1))
    webhook.refuse = 2
    monitor, emitted = _monitor(tmp_path, AlertSettings(urls=(_url(webhook),)))
    _now(monitor, HANG)
    until(lambda: emitted)
    assert [(event.name, event.fields["target"]) for event in emitted] == [
        ("alert_sent", "target 1 (json)")
    ]
    (body,) = webhook.bodies
    assert body["title"] == "m: STOPPED: HANG DETECTED: rank 2 in data for 912s"
    # `test_one_wording` compares the lines that follow with the other surfaces.
    line, state, *_ = body["message"].splitlines()
    assert line == "HANG DETECTED: rank 2 in data for 912s"
    assert state.startswith("STOPPED: no guard has run here yet")
    monitor.on_stop()
    assert not monitor.lingers()


def test_what_follows_one_crash_is_one_message_that_leads_with_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All alerts of three crashes once led with EARNING, two or three messages a crash."""
    sent: list[Alert] = []
    monkeypatch.setattr(alerts.Target, "put", lambda _self, alert: sent.append(alert))
    monitor, _ = _monitor(tmp_path, AlertSettings(urls=("json://127.0.0.1:9/",)))
    exited = event("miner_exited", "error", "MINER EXITED: exit code 1", how="exit code 1")
    oom = _incident("cuda_oom").at("critical")
    monitor.on_event(exited)
    monitor.on_event(oom)
    monitor.on_tick(monitor.context.clock.monotonic(), {})
    assert not sent, "the incident may still follow"
    monitor.on_tick(math.inf, {})
    (message,) = sent
    lines = message.body.splitlines()
    assert lines[0].startswith("INCIDENT cuda_oom")
    assert lines[1].startswith("MINER EXITED: exit code 1")
    _now(monitor, exited, HANG)
    assert len(sent) == 1, "until the miner steps again, this is the same stop"
    monkeypatch.setattr(alerts, "_LASTS_S", 0.0)
    for step in (1, 2):
        list(monitor.on_steps(0, [StepRecord(inner_step=step, loss=3.0)]))
    _now(monitor)
    assert len(sent) == 2
    assert ": RESOLVED " in sent[1].title
    failed = [
        event("guard_degraded", "error", f"GUARD DEGRADED: {n}", job=f"job {n}") for n in range(30)
    ]
    _now(monitor, *failed)
    assert "and 22 more lines: `miner-guard logs`" in sent[-1].body
    verdict = {"life": "training", "colour": "green", "cause": "x"}
    again, _ = _monitor(
        tmp_path,
        AlertSettings(urls=("json://127.0.0.1:9/",)),
        {"state": "running", "verdict": verdict},
    )
    _now(again, oom)
    assert sent[-1].title == "m: TRAINING again: INCIDENT cuda_oom: c"
    assert sent[-1].body.endswith("Next: so that it does not happen again: f")


def test_a_crash_loop_is_two_messages_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its launches takes a step or two; each once sent RESOLVED, and so did its end."""
    sent: list[Alert] = []
    monkeypatch.setattr(alerts.Target, "put", lambda _self, alert: sent.append(alert))
    monitor, _ = _monitor(tmp_path, AlertSettings(urls=("json://127.0.0.1:9/",)))
    clock = FakeClock()
    monitor.context = replace(monitor.context, clock=clock)
    exited = event("miner_exited", "error", "MINER EXITED: exit code 1", how="exit code 1")
    loop = event("crash_loop", "critical", "CRASH LOOP: code_bug", detail="code_bug")
    asked = event("miner_exited", "info", "MINER EXITED: as requested", how="as requested")
    _now(monitor, exited, _incident("code_bug"))
    monitor.on_steps(0, [StepRecord(inner_step=1, loss=3.0)])
    clock.advance(3600.0)
    _now(monitor)
    assert len(sent) == 1, "a last step that comes after the exit is no training"
    for rest in ((), (), (loop, asked)):
        for each in (exited, _incident("code_bug"), *rest):
            monitor.on_event(each)
        for _ in range(0 if rest else 20):
            clock.advance(1.0)
            monitor.on_steps(0, [StepRecord(inner_step=1, loss=3.0)])
            monitor.on_tick(clock.monotonic(), {})
    monitor.on_stop()
    causes = [alert.title.split(": ", 2)[2] for alert in sent]
    assert causes == ["INCIDENT code_bug: c", "CRASH LOOP: code_bug"]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a webhook that accepts connections and never answers."""
    requires.module("apprise")
    server = socket.create_server(("127.0.0.1", 0))
    yield f"json://127.0.0.1:{server.getsockname()[1]}/planted-secret-path"
    server.close()


def test_a_webhook_that_never_answers_delays_neither_the_guard_nor_the_other_target(
    tmp_path: Path, silent: str, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "RETRIES_S", (600.0,))
    settings = AlertSettings(urls=(silent, _url(webhook)), cooldown_s=0)
    monitor, emitted = _monitor(tmp_path, settings)
    start = time.monotonic()
    for number in range(200):
        _now(monitor, event("upload_failed", "error", f"UPLOAD FAILED: {number}", what=str(number)))
    assert time.monotonic() - start < 20, "milliseconds are meant; waiting would take 800 s"
    assert monitor.snapshot()["dropped"] >= 100
    until(lambda: len(webhook.bodies) >= 2)
    assert {event.fields["target"] for event in emitted} == {"target 2 (json)"}
    assert monitor.lingers()
    monitor.on_stop()
    until(lambda: any(event.name == "guard_degraded" for event in emitted), 60)
    (lost,) = [event for event in emitted if event.name == "guard_degraded"][:1]
    assert "alert not sent: target 1 (json) did not accept the message" in lost.text
    assert "planted-secret-path" not in lost.text


_LOADS_AT_THE_FIRST_ADDRESS = """
import time
_plugins, _loading = {}, False

class Apprise:
    @staticmethod
    def instantiate(url):
        global _loading
        if not _loading:
            _loading = True
            time.sleep(0.5)
            _plugins["json"] = object()
        return _plugins.get(url.partition(":")[0])

    def add(self, target):
        pass

    def notify(self, **letter):
        return True
"""


def test_no_target_is_lost_while_the_first_one_loads_the_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread once found Apprise's list of plugins half filled, in a new container."""
    (tmp_path / "apprise.py").write_text(_LOADS_AT_THE_FIRST_ADDRESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apprise", raising=False)
    answer = send_test(AlertSettings(urls=("json://127.0.0.1:1/a", "json://127.0.0.1:1/b")))
    assert (answer.value, answer.reason) == (2, None)


def test_what_waits_at_the_end_is_tried_once_more_and_lingering_ends_when_it_arrived(
    tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "RETRIES_S", (600.0, 600.0))
    webhook.refuse = 1
    monitor, emitted = _monitor(tmp_path, AlertSettings(urls=(_url(webhook),)))
    _now(monitor, HANG)
    until(lambda: webhook.refuse == 0)
    _now(monitor, event("crash_loop", "critical", "CRASH LOOP: x", detail="x", restarts=5))
    monitor.on_stop()
    until(lambda: not monitor.lingers())
    assert len(webhook.bodies) == 2
    assert [event.name for event in emitted] == ["alert_sent"] * 2


def test_the_heartbeat_is_sent_while_the_miner_progresses_and_only_then(
    tmp_path: Path, webhook: Webhook
) -> None:
    url = f"http://{webhook.address}/beat"
    status = {"state": "running", "verdict": {"life": "training"}}
    monitor, _ = _monitor(tmp_path, AlertSettings(heartbeat_url=url), status)
    jobs = monitor.context.jobs
    assert isinstance(jobs, JobsAtOnce)
    jobs.repeated["heartbeat"]()
    assert len(webhook.beats) == 1
    status["verdict"] = {"life": "hung"}
    jobs.repeated["heartbeat"]()
    assert len(webhook.beats) == 1


def test_the_test_message(
    tmp_path: Path,
    webhook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--alerts"]) == 64
    monkeypatch.setenv("MINER_GUARD_ALERTS__URLS", _url(webhook))
    assert run(["doctor", "--alerts"]) == 0
    assert "sent to 1 target in" in capsys.readouterr().out
    monkeypatch.setenv(
        "MINER_GUARD_ALERTS__URLS",
        f"{_url(webhook)},json://127.0.0.1:9/planted-secret-path,nonsense://x",
    )
    assert run(["doctor", "--alerts"]) == 1
    words = capsys.readouterr().err
    assert (
        "target 2 (json) did not accept the message; target 3 (nonsense) is not an address" in words
    )
    assert "planted-secret-path" not in words


def test_without_apprise_the_start_and_the_failed_alert_name_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ModuleNotFoundError at the first incident was once the only sign that alerts did not
    work."""
    monkeypatch.setitem(sys.modules, "apprise", None)
    settings = AlertSettings(urls=("json://127.0.0.1:1/planted-secret-path",))
    words = "apprise is not installed; pip install 'apprise>=1.7'"
    assert words in (send_test(settings).reason or "")
    monitor, emitted = _monitor(tmp_path, settings)
    monitor.on_stop()
    assert [(event.name, words in event.text) for event in emitted] == [("guard_degraded", True)]
    assert not _monitor(tmp_path, AlertSettings())[1]
