"""The monitor that keeps the HTTP port open: refused settings, a port in use, a port that ended."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from miner_guard.config import Config, HttpSettings
from miner_guard.rank.layout import FLAG_FIRST
from miner_guard.record.events import Event, event
from miner_guard.show.monitors import MetricsMonitor
from miner_guard.system.clock import FakeClock
from tests.support import requires
from tests.support.contexts import context
from tests.support.driven_steps import make_step
from tests.support.http_port import ask

TOKEN = "token-of-the-test"


def _monitor(folder: Path, settings: HttpSettings) -> tuple[MetricsMonitor, list[Event], FakeClock]:
    events: list[Event] = []
    clock = FakeClock()
    around = context(folder, config=Config(http=settings), clock=clock, emit=events.append)
    monitor = MetricsMonitor(around)
    events += monitor.on_tick(clock.monotonic(), {})
    return monitor, events, clock


def test_no_port_is_opened_to_the_world_without_a_token(tmp_path: Path) -> None:
    monitor, events, _ = _monitor(tmp_path, HttpSettings(port=0, host="0.0.0.0"))
    assert monitor.snapshot()["url"] is None
    assert [event.name for event in events] == ["guard_degraded"]
    assert "not a loopback address and no token" in events[0].fields["what"]
    monitor, _, _ = _monitor(tmp_path, HttpSettings(port=0, host="0.0.0.0", token="s" * 16))
    assert monitor.snapshot()["url"], "a token opens it"
    monitor.on_stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_no_port_is_opened_to_the_world_with_a_token_that_can_be_guessed(
    tmp_path: Path, host: str
) -> None:
    monitor, events, _ = _monitor(
        tmp_path, HttpSettings(port=0, host=host, token="s3cret-of-mine!")
    )
    assert monitor.snapshot()["url"] is None
    assert "the token has only 15 characters; use at least 16" in events[0].fields["what"]
    assert "s3cret" not in events[0].fields["what"]


def test_a_port_in_use_is_reported_once_and_tried_again(tmp_path: Path) -> None:
    requires.module("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monitor, events, clock = _monitor(tmp_path, HttpSettings(port=number))
        clock.advance(31)
        events += monitor.on_tick(clock.monotonic(), {})
        assert [event.name for event in events] == ["guard_degraded"]
        assert "is it in use?" in events[0].fields["what"]
    clock.advance(31)
    list(monitor.on_tick(clock.monotonic(), {}))
    assert monitor.snapshot()["url"] == f"http://127.0.0.1:{number}/"
    list(monitor.on_stop())


def test_a_port_whose_thread_ended_is_opened_again(tmp_path: Path) -> None:
    requires.module("uvicorn")
    monitor, events, clock = _monitor(tmp_path, HttpSettings(port=0))
    assert monitor._port is not None
    monitor._port.close()
    monitor._port._thread.join(10)
    events += monitor.on_tick(clock.monotonic(), {})
    starts = [event.text.partition(" http")[0] for event in events]
    assert starts == ["HTTP", "GUARD RECOVERED: HTTP"], "at the start, nothing has recovered"
    assert ask(f"{monitor.snapshot()['url']}healthz")[0] == 503
    list(monitor.on_stop())
    assert monitor.snapshot()["url"] is None


def test_steps_uploads_and_recoveries_are_counted_by_how_long_they_took(tmp_path: Path) -> None:
    monitor, _, clock = _monitor(tmp_path, HttpSettings())
    clock.advance(1000)
    steps = [
        make_step(1, 0.0, 500.0, flags=FLAG_FIRST),
        make_step(2, 500.0, 10.0),
        make_step(3, 510.0, 10.1),
    ]
    list(monitor.on_steps(1, steps))
    list(monitor.on_steps(0, steps[:2]))
    list(monitor.on_event(event("upload_succeeded", "info", "UPLOAD VERIFIED", took_s=9.0)))
    list(monitor.on_event(event("upload_succeeded", "info", "UPLOAD VERIFIED", took_s=None)))
    hung_at = clock.monotonic()
    for _ in range(2):
        list(monitor.on_event(event("hang_detected", "critical", "HANG DETECTED")))
        clock.advance(30)
    list(monitor.on_steps(0, [make_step(4, hung_at + 80, 10.0), make_step(5, hung_at + 90, 10.0)]))
    took = monitor.snapshot()["histograms"]
    step = took["step_seconds"]["buckets"]
    assert (step["5"], step["10"], step["15"], step["+Inf"]) == (0, 4, 5, 5)
    assert took["step_seconds"]["sum"] == pytest.approx(50.1)
    uploads, recoveries = took["upload_seconds"], took["recovery_seconds"]
    assert (uploads["buckets"]["5"], uploads["buckets"]["10"], uploads["sum"]) == (0, 1, 9.0)
    assert (recoveries["buckets"]["60"], recoveries["buckets"]["120"]) == (0, 1)
    assert recoveries["sum"] == 90.0
