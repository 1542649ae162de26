"""The HTTP port: what it tells, who may ask, and that attacks on it reach neither guard nor
miner."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import Config, HttpSettings
from miner_guard.eventlog.catalog import Finding
from miner_guard.monitors.metrics import MetricsMonitor
from miner_guard.state_dir import read_json, write_json
from miner_guard.system.clock import FakeClock, iso_utc
from tests.support import requires
from tests.support.contexts import JobsAtOnce, context
from tests.support.waiting import until

TOKEN = "token-of-the-test"


def _ask(url: str, token: str | None = None, host: str | None = None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(
        url, headers=headers if host is None else {**headers, "Host": host}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Port:
    """The port's process alone, over a state directory that the test writes."""

    def __init__(self, state: Path, token: str | None = None, **further: Any) -> None:
        self.state = state
        order = {
            "state": str(state),
            "host": "127.0.0.1",
            "port": 0,
            "token": token,
            "hang": {},
            **further,
        }
        self.child = subprocess.Popen(
            [sys.executable, "-m", "miner_guard.reporting.http_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(order).encode() + b"\n")
        self.child.stdin.flush()
        self.number = int(self.child.stdout.readline())
        self.url = f"http://127.0.0.1:{self.number}"

    def status(self, **fields: Any) -> None:
        started = iso_utc(time.time() - 60)
        write_json(
            self.state / "status.json",
            {"state": "running", "started": started, "run_id": "r1", **fields},
        )

    def close(self) -> int:
        assert self.child.stdin is not None
        self.child.stdin.close()
        return self.child.wait(timeout=10)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    requires.module("uvicorn")
    opened = Port(tmp_path)
    yield opened
    assert opened.close() == 0, "it ends when the guard does"


def test_metrics_are_what_prometheus_reads(port: Port) -> None:
    gpu = {
        "index": 0,
        "uuid": "GPU-1",
        "state": "ok",
        "memory_used_bytes": 5,
        "utilization_ratio": None,
    }
    port.status(
        steps={
            "loss": 3.4,
            "p50_s": 15.2,
            "per_rank": {"0": {"step_time_s": 15.0}},
            "goodput": {"training": 0.9},
        },
        uploads={"repo": {"age_s": 612, "stale": False}},
        health={"gpus": {"gpus": [gpu]}, "host": {"memory_used_bytes": 7, "cpu_pct": 50.0}},
        metrics={"events": {"slow_step": 2}},
    )
    code, text = _ask(f"{port.url}/metrics")
    assert code == 200
    lines = text.splitlines()
    for line in (
        "minerguard_loss 3.4",
        "minerguard_step_p50_seconds 15.2",
        "minerguard_repo_age_seconds 612.0",
        'minerguard_gpu_memory_used_bytes{gpu="0",uuid="GPU-1"} 5.0',
        "minerguard_host_cpu_ratio 0.5",
        'minerguard_events_total{event="slow_step"} 2.0',
        'minerguard_time_ratio{category="training"} 0.9',
    ):
        assert line in lines
    assert "gpu_utilization_ratio" not in text, "what is unknown is absent"
    promtool = requires.tool("promtool")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, 200, "progressing"),
        ({"steps": {"last_step_age_s": 20, "max_s": 15}}, 200, "progressing"),
        ({"steps": {"last_step_age_s": 400, "max_s": 15}}, 503, "(limit 300 s)"),
        ({"steps": {"last_step_age_s": 400, "max_s": 100}}, 200, "progressing"),
        (
            {
                "steps": {"last_step_age_s": 400, "max_s": 15},
                "hang": {"watching": True, "hang": None},
            },
            200,
            "progressing",
        ),
        (
            {"hang": {"watching": True, "hang": "rank 2 in data for 912s"}},
            503,
            "hang: rank 2 in data for 912s",
        ),
        ({"state": "waiting"}, 503, "the miner is waiting"),
        ({"started": iso_utc(0)}, 503, "no first step within"),
        ({"started": None}, 503, "start is unknown"),
    ],
)
def test_healthz_fails_when_the_miner_does_not_progress(
    port: Port, fields: dict[str, Any], code: int, words: str
) -> None:
    port.status(**fields)
    answer = _ask(f"{port.url}/healthz")
    assert answer[0] == code
    assert words in answer[1]


def test_healthz_fails_when_the_guard_itself_is_silent(port: Port) -> None:
    assert _ask(f"{port.url}/healthz")[0] == 503
    port.status()
    old = time.time() - 120
    os.utime(port.state / "status.json", (old, old))
    code, words = _ask(f"{port.url}/healthz")
    assert code == 503
    assert "written nothing for 120 s" in words


def test_with_a_token_only_health_and_the_empty_page_are_open(tmp_path: Path) -> None:
    requires.module("uvicorn")
    port = Port(tmp_path, TOKEN)
    try:
        port.status()
        for path in ("/report", "/report?range=1h", "/metrics", "/status"):
            assert _ask(port.url + path)[0] == 401
            assert _ask(port.url + path, "wrong")[0] == 401
            assert _ask(port.url + path, TOKEN)[0] == 200
        assert _ask(port.url + "/no-such-address")[0] == 401
        for path in ("/healthz", "/", "/live.js", "/chart.js"):
            assert _ask(port.url + path)[0] == 200
        assert _ask(port.url + "/../guard.jsonl", TOKEN)[0] == 404
    finally:
        port.close()


def test_a_web_page_that_points_its_own_name_at_the_port_reads_nothing(port: Port) -> None:
    """Guards against DNS rebinding: the browser of somebody with a tunnel would show the page all
    of /status."""
    port.status(command=["python", "miner.py", "--wallet", "planted"])
    hosts = ("evil.example", "evil.example:9123", "127.0.0.1.evil.example", "", "x" * 300)
    for host, path in itertools.product(
        hosts, ("/", "/metrics", "/status", "/healthz", "/live.js")
    ):
        code, words = _ask(port.url + path, host=host)
        assert code == 421
        assert "planted" not in words
        assert "[http] trusted_hosts" in words


def test_addresses_localhost_and_trusted_names_are_answered(tmp_path: Path) -> None:
    requires.module("uvicorn")
    port = Port(tmp_path, trusted_hosts=["Miner.lan"])
    try:
        port.status()
        for host in (
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:9123",
            "[::1]:9123",
            "10.0.0.7",
            "miner.lan",
        ):
            assert _ask(f"{port.url}/status", host=host)[0] == 200, host
    finally:
        port.close()


def test_with_a_token_any_name_will_do(tmp_path: Path) -> None:
    """No page knows the token, and Prometheus may reach a miner by any name."""
    requires.module("uvicorn")
    port = Port(tmp_path, TOKEN)
    try:
        port.status()
        assert _ask(f"{port.url}/status", TOKEN, host="miner-7.example")[0] == 200
    finally:
        port.close()


def test_nothing_can_be_changed_through_the_port(port: Port) -> None:
    port.status()
    for method, path in itertools.product(("POST", "PUT", "DELETE", "PATCH"), ("/", "/status")):
        request = urllib.request.Request(port.url + path, data=b"{}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 405
        assert "Access-Control-Allow-Origin" not in refused.value.headers


def _attack(number: int) -> list[socket.socket]:
    """200 connections: garbage, half a request, an endless header, nothing at all."""
    attacks = (
        b"\x00\xff\xfe garbage \r\n\r\n",
        b"GET /metrics HT",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000,
        b"",
    )
    sockets = []
    for place in range(200):
        one = socket.create_connection(("127.0.0.1", number), timeout=10)
        one.setblocking(False)
        with contextlib.suppress(OSError):
            one.send(attacks[place % len(attacks)])
        sockets.append(one)
    return sockets


def test_an_attack_leaves_the_port_answering_and_is_shown_the_door(port: Port) -> None:
    port.status()
    sockets = _attack(port.number)
    try:
        assert _ask(f"{port.url}/healthz")[0] == 200
        deadline = time.monotonic() + 40
        waiting = set(sockets)
        while waiting and time.monotonic() < deadline:
            for one in list(waiting):
                try:
                    if one.recv(65536) == b"":
                        waiting.discard(one)
                except BlockingIOError:
                    continue
                except OSError:
                    waiting.discard(one)
            time.sleep(0.2)
        assert not waiting, f"{len(waiting)} connections were still open after 40 s"
    finally:
        for one in sockets:
            one.close()


def test_training_goes_on_while_the_port_is_attacked(tmp_path: Path) -> None:
    """End to end: the supervised miner's steps stay on time with 200 hostile connections open."""
    requires.module("uvicorn")
    state, script = tmp_path / "state", tmp_path / "train.py"
    script.write_text(
        "import time, miner_guard\nguard = miner_guard.init()\n"
        "for step in range(1, 121):\n    time.sleep(0.1)\n    guard.step(outer_step=1, "
        "inner_step=step, loss=1.0)\n"
        "guard.close(finished=True)\n"
    )
    guard = subprocess.Popen(
        [
            Path(sys.executable).with_name("miner-guard"),
            "run",
            "--no-preflight",
            "--state-dir",
            state,
            "--",
            sys.executable,
            script,
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "MINER_GUARD_HTTP__PORT": "0"},
    )
    try:
        number = _port_of(state)
        sockets = _attack(number)
        assert guard.wait(timeout=90) == 0
        for one in sockets:
            one.close()
    finally:
        guard.kill()
    steps = (read_json(state / "status.json") or {})["steps"]
    assert steps["steps"] == 120
    assert steps["p50_s"] < 0.3


def _port_of(state: Path) -> int:
    url = until(
        lambda: ((read_json(state / "status.json") or {}).get("metrics") or {}).get("url"),
        40,
        "the port",
    )
    return int(str(url).rstrip("/").rsplit(":", 1)[1])


def _part(folder: Path, settings: HttpSettings) -> tuple[MetricsMonitor, list[Finding], FakeClock]:
    said: list[Finding] = []
    clock = FakeClock()
    around = context(
        folder, config=Config(http=settings), clock=clock, emit=said.append, jobs=JobsAtOnce()
    )
    return MetricsMonitor(around), said, clock


def test_no_port_is_opened_to_the_world_without_a_token(tmp_path: Path) -> None:
    part, said, _ = _part(tmp_path, HttpSettings(port=0, host="0.0.0.0"))
    assert part.snapshot()["url"] is None
    assert [finding.event for finding in said] == ["guard_degraded"]
    assert "not loopback and no token" in said[0].fields["what"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_no_port_is_opened_to_the_world_with_a_token_that_can_be_guessed(
    tmp_path: Path, host: str
) -> None:
    part, said, _ = _part(tmp_path, HttpSettings(port=0, host=host, token="s3cret-of-mine!"))
    assert part.snapshot()["url"] is None
    assert "the token has 15 characters; give one of at least 16" in said[0].fields["what"]
    assert "s3cret" not in said[0].fields["what"]


def test_a_port_in_use_is_said_once_and_tried_again(tmp_path: Path) -> None:
    requires.module("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        part, said, clock = _part(tmp_path, HttpSettings(port=number))
        clock.advance(31)
        list(part.on_tick(clock.monotonic(), {}))
        assert [finding.event for finding in said] == ["guard_degraded"]
        assert "is it in use?" in said[0].fields["what"]
    clock.advance(31)
    list(part.on_tick(clock.monotonic(), {}))
    assert part.snapshot()["url"] == f"http://127.0.0.1:{number}/"
    list(part.on_stop())


def test_a_guard_that_ends_while_its_port_opens_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miner that ended at once was followed by SAMPLER FAILED: readline of closed file."""
    requires.module("uvicorn")
    part: list[MetricsMonitor] = []
    ready = select.select

    def stopped_meanwhile(*arguments: Any) -> Any:
        list(part[0].on_stop())
        return ready(*arguments)

    monkeypatch.setattr(select, "select", stopped_meanwhile)
    jobs = _Later()
    said: list[Finding] = []
    part.append(
        MetricsMonitor(
            context(tmp_path, config=Config(http=HttpSettings(port=0)), emit=said.append, jobs=jobs)
        )
    )
    (opening,) = jobs.work
    opening()
    server = part[0]._server
    assert server is not None
    assert (said, server.child) == ([], None)


class _Later:
    def __init__(self) -> None:
        self.work: list[Any] = []

    def once(self, _name: str, work: Any) -> None:
        self.work.append(work)


def test_a_killed_port_process_comes_back(tmp_path: Path) -> None:
    requires.module("uvicorn")
    part, said, clock = _part(tmp_path, HttpSettings(port=0))
    first = part.snapshot()["url"]
    assert part._server is not None
    assert part._server.child is not None
    part._server.child.kill()
    part._server.child.wait()
    for _ in range(2):
        clock.advance(31)
        list(part.on_tick(clock.monotonic(), {}))
    second = part.snapshot()["url"]
    assert [finding.event for finding in said] == [
        "http_listening",
        "guard_degraded",
        "http_listening",
    ]
    assert first
    assert _ask(f"{second}healthz")[0] == 503
    list(part.on_stop())
