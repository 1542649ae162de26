"""OTLP: the data that a receiver gets from a running guard, and the guard's behaviour without a
receiver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.record.store import RunReader
from tests.faults.guarded import living
from tests.servers.otlp import Receiver, attributes
from tests.support.present_state import status_of
from tests.support.waiting import until

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


def guard(folder: Path, endpoint: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).with_name("miner-guard")
    settings = {
        "MINER_GUARD_OTEL__ENDPOINT": endpoint,
        "MINER_GUARD_RESTART__ENABLED": "false",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
    }
    return subprocess.Popen(
        [program, "run", "--no-preflight", "--state-dir", folder / "state", "--", *command],
        cwd=folder,
        env={**os.environ, **settings, **env},
        stdout=subprocess.DEVNULL,
    )


def logged(state: Path) -> list[str]:
    """The events at level info or above, which are the ones that the sender exports."""
    return [hit.name for hit in RunReader(state / "run.db").events(min_level="info")]


def own_words(state: Path) -> str:
    """What the guard logged of its own parts."""
    hits = RunReader(state / "run.db").events(["guard_degraded"])
    return "\n".join(hit.text for hit in hits if "OTLP" in hit.text)


@pytest.mark.slow
def test_a_receiver_gets_every_event_once_and_the_metrics_of_a_run(
    tmp_path: Path, receiver: Receiver
) -> None:
    secrets = {
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=planted-secret",
        "R2_WRITE_SECRET_ACCESS_KEY": "x" * 9,
    }
    script, mark = tmp_path / "train.py", uuid.uuid4().hex
    script.write_text(MINER)
    run = guard(tmp_path, receiver.endpoint, sys.executable, str(script), _MARK=mark, **secrets)
    assert run.wait(90) == 3
    state = tmp_path / "state"
    until(lambda: "guard_stopped" in receiver.events(), 20, lambda: str(receiver.events()))
    assert receiver.events() == logged(state)
    assert all(headers["api-key"] == "planted-secret" for headers in receiver.headers)
    assert "planted-secret" not in (state / "guard.jsonl").read_text()

    by_name = {record.event_name: (resource, record) for resource, record in receiver.records()}
    resource, nan = by_name["miner_guard.loss_nan"]
    assert (resource["service.name"], resource["miner_guard.name"]) == ("miner-guard", "state")
    (started,) = RunReader(state / "run.db").events({"guard_started"})
    assert resource["service.instance.id"] == started.record()["run_id"]
    assert (nan.severity_text, nan.severity_number) == ("CRITICAL", 21)
    assert plain_body(nan) == "Loss is NaN or Inf at step 20"
    assert attributes(nan.attributes)["miner_guard.rank"] == 0
    (hit,) = RunReader(state / "run.db").events({"loss_nan"})
    assert time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(nan.time_unix_nano / 1e9)) == hit.ts[:19]
    incident = attributes(by_name["miner_guard.incident"][1].attributes)
    assert incident["error.type"] == incident["miner_guard.label"] != ""

    until(lambda: not living(mark), 20, "the sender's end, after the last metrics")
    (exited,) = RunReader(state / "run.db").events({"miner_exited"})
    assert receiver.lengths_s() == {"launch": pytest.approx(exited.fields["runtime_s"])}
    metrics = receiver.latest_metrics()
    (point,) = metrics["miner_guard.inner_step"].gauge.data_points
    assert point.as_double == status_of(state)["steps"]["inner_step"] > 30
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
    mark = uuid.uuid4().hex
    run = guard(tmp_path, receiver.endpoint, "sleep", "600", _MARK=mark)
    state = tmp_path / "state"
    until(lambda: "miner_started" in receiver.events(), 40, "the first events")
    receiver.answer = 400
    until(lambda: "fails: " in own_words(state), 60, "the failure")
    receiver.answer = 200
    until(lambda: "GUARD RECOVERED: OTLP" in own_words(state), 60, "the recovery")
    receiver.close()
    run.terminate()
    begun = time.monotonic()
    assert run.wait(30) == 0
    assert time.monotonic() - begun < 20
    until(lambda: not living(mark), 30, "the end of the exporter")


def test_an_endpoint_that_is_not_a_url_is_refused_with_the_right_form(tmp_path: Path) -> None:
    run = guard(tmp_path, "127.0.0.1:4317", "true")
    run.wait(60)
    lines = (tmp_path / "state" / "guard.jsonl").read_text().splitlines()
    (reported,) = [json.loads(line) for line in lines if "no OTLP export" in line]
    assert "does not begin with http:// or https://" in reported["msg"]
