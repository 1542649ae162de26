"""OTLP: the data that a receiver gets from a running guard, and the guard's behaviour without a
receiver."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.record.store import RunReader
from tests.faults.guarded import Guarded, until
from tests.servers.otlp import Receiver, attributes
from tests.support.present_state import status_of

MINER = """
import time, miner_guard
guard = miner_guard.init()
for step in range(1, 40):
    time.sleep(0.05)
    guard.step(outer_step=1, inner_step=step, loss=float("nan") if step == 20 else 3.0, lr=1e-3)
print("RuntimeError: CUDA error: device-side assert triggered", flush=True)
raise SystemExit(3)
"""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.close()


def start(folder: Path, endpoint: str, *command: str, **env: str) -> Guarded:
    guard = Guarded(folder)
    sdk = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_METRIC_EXPORT_INTERVAL": "1000"}
    settings = {"otel.endpoint": endpoint, "restart.enabled": "false"}
    guard.start(command, settings=settings, env={**sdk, **env}, cwd=folder)
    return guard


@pytest.mark.slow
def test_a_receiver_gets_every_event_once_and_the_metrics_of_a_run(
    tmp_path: Path, receiver: Receiver
) -> None:
    secrets = {
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=planted-secret",
        "R2_WRITE_SECRET_ACCESS_KEY": "x" * 9,
    }
    script = tmp_path / "train.py"
    script.write_text(MINER)
    guard = start(tmp_path, receiver.endpoint, sys.executable, str(script), **secrets)
    assert guard.processes[0].wait(90) == 3
    record = RunReader(guard.state.db)
    until(lambda: "guard_stopped" in receiver.events(), 20, lambda: str(receiver.events()))
    assert receiver.events() == [each.name for each in record.events(min_level="info")]
    assert all(headers["api-key"] == "planted-secret" for headers in receiver.headers)
    assert "planted-secret" not in guard.state.log.read_text()

    by_name = {record.event_name: (resource, record) for resource, record in receiver.records()}
    resource, nan = by_name["miner_guard.loss_nan"]
    assert (resource["service.name"], resource["miner_guard.name"]) == ("miner-guard", "state")
    (started,) = record.events({"guard_started"})
    assert resource["service.instance.id"] == started.record()["run_id"]
    assert (nan.severity_text, nan.severity_number) == ("CRITICAL", 21)
    assert plain_body(nan) == "Loss is NaN or Inf at step 20"
    assert attributes(nan.attributes)["miner_guard.rank"] == 0
    (hit,) = record.events({"loss_nan"})
    assert time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(nan.time_unix_nano / 1e9)) == hit.ts[:19]
    incident = attributes(by_name["miner_guard.incident"][1].attributes)
    assert incident["error.type"] == incident["miner_guard.label"] != ""

    guard.assert_nothing_left(20)  # The sender ends after the last metrics.
    (exited,) = record.events({"miner_exited"})
    assert receiver.lengths_s() == {"launch": pytest.approx(exited.fields["runtime_s"])}
    metrics = receiver.latest_metrics()
    (point,) = metrics["miner_guard.inner_step"].gauge.data_points
    assert point.as_double == status_of(guard.state.root)["steps"]["inner_step"] > 30
    (cpu,) = metrics["miner_guard.guard_cpu"].sum.data_points
    assert metrics["miner_guard.guard_cpu"].sum.is_monotonic
    assert cpu.as_double > 0
    (steps,) = metrics["miner_guard.step"].histogram.data_points
    assert steps.count > 30
    assert not steps.HasField("min")
    assert 0.02 < steps.sum / steps.count < 1
    counts = {
        attributes(point.attributes)["miner_guard.event"]: point.as_double
        for point in metrics["miner_guard.events"].sum.data_points
    }
    assert counts["loss_nan"] == 1


def plain_body(record: Any) -> str:
    return str(record.body.string_value)


@pytest.mark.slow
def test_a_receiver_that_is_gone_is_reported_and_neither_stops_nor_delays_the_guard(
    tmp_path: Path, receiver: Receiver
) -> None:
    guard = start(tmp_path, receiver.endpoint, "sleep", "600")
    until(lambda: "miner_started" in receiver.events(), 40, "the first events")
    receiver.answer = 400
    guard.wait_for("guard_degraded", line="GUARD DEGRADED: OTLP export of")
    receiver.answer = 200
    guard.wait_for("guard_degraded", line="GUARD RECOVERED: OTLP")
    receiver.close()
    begun = time.monotonic()
    assert guard.stop(signal.SIGTERM, 30) == 0
    assert time.monotonic() - begun < 20
    guard.assert_nothing_left(30)


def test_an_endpoint_that_is_not_a_url_is_refused_with_the_right_form(tmp_path: Path) -> None:
    guard = start(tmp_path, "127.0.0.1:4317", "true")
    guard.processes[0].wait(60)
    (reported,) = [event for event in guard.events if "no OTLP export" in event["msg"]]
    assert "does not begin with http:// or https://" in reported["msg"]
