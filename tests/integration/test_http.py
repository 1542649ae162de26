"""The HTTP port: what it shows to whom, and that attacks on it affect neither guard nor miner."""

from __future__ import annotations

import contextlib
import itertools
import json
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

from miner_guard.show import http
from miner_guard.state_dir import StateDir
from tests.faults.guarded import guarding
from tests.support import requires
from tests.support.http_port import Port, ask
from tests.support.present_state import status_of, write_status
from tests.support.waiting import until

TOKEN = "token-of-the-test"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    opened = Port(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def locked_port(tmp_path: Path) -> Iterator[Port]:
    opened = Port(tmp_path, TOKEN)
    yield opened
    opened.close()


def _write_status(port: Port, **more: Any) -> None:
    took = {"buckets": {"10": 2, "20": 8, "+Inf": 9}, "sum": 140.0}
    gpu = {
        "index": 0,
        "uuid": "GPU-1",
        "state": "ok",
        "memory_used_bytes": 5,
        "utilization_ratio": None,
    }
    port.status(
        steps={"loss": 3.4, "per_rank": {"0": {"step_time_s": 15.0}}, "goodput": {"training": 0.9}},
        health={"gpus": {"gpus": [gpu]}, "host": {"memory_used_bytes": 7, "cpu_pct": 50.0}},
        metrics={"events": {"slow_step": 2, "incident": 3}, "histograms": {"step_seconds": took}},
        **{"uploads": {"repo": {"age_s": 612, "stale": False}}, **more},
    )


def test_metrics_are_what_prometheus_reads(port: Port) -> None:
    _write_status(port)
    code, text = ask(f"{port.url}/metrics")
    assert code == 200
    lines = text.splitlines()
    for line in (
        "minerguard_loss 3.4",
        'minerguard_step_seconds_bucket{le="20"} 8.0',
        "minerguard_step_seconds_count 9.0",
        "minerguard_step_seconds_sum 140.0",
        'minerguard_gpu_memory_used_bytes{gpu="0",uuid="GPU-1"} 5.0',
        "minerguard_host_cpu_ratio 0.5",
        'minerguard_events_total{event="slow_step"} 2.0',
        'minerguard_time_ratio{category="training"} 0.9',
    ):
        assert line in lines
    assert "\nminerguard_repo_age_seconds 612." in text
    assert "gpu_utilization_ratio" not in text, "what is unknown is absent"
    promtool = requires.tool("promtool")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_sample_names_its_miner_and_openmetrics_links_the_latest_incident(port: Port) -> None:
    """Otherwise an alert of a fleet names an address, and nobody knows whose miner it is."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    hotkey = "5F3sa2TJAWMqDhXG6jhV4N8ko9SxwGy8TpaNS1repo5EYjQX"
    _write_status(
        port,
        name="sn38",
        host="node-7",
        chain={"netuid": 38, "hotkey": hotkey},
        uploads={"incident": {"label": "cuda_oom", "rank": 2, "wall": 1.0}},
    )
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    request = urllib.request.Request(f"{port.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    whose = {"miner": "sn38", "node": "node-7", "netuid": "38", "hotkey": "5F3sa2TJ"}
    assert len(samples) > 80
    assert [sample for sample in samples if not whose.items() <= sample.labels.items()] == []
    (linked,) = [sample for sample in samples if sample.exemplar]
    assert linked.labels["event"] == "incident"
    assert linked.exemplar.labels == {"label": "cuda_oom", "rank": "2"}


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        ({"life": "training", "colour": "red"}, 200, "progressing"),
        ({"life": "starting", "colour": "grey"}, 200, "progressing"),
        ({"life": "starting", "colour": "yellow", "cause": "no first step"}, 503, "no first step"),
        ({"life": "hung", "cause": "rank 2 in data for 912s"}, 503, "HUNG: rank 2 in data"),
        ({"life": "restarting"}, 503, "not progressing"),
    ],
)
def test_healthz_fails_when_the_miner_does_not_progress(
    port: Port, verdict: dict[str, Any], code: int, words: str
) -> None:
    port.status(verdict=verdict)
    answer = ask(f"{port.url}/healthz")
    assert answer[0] == code
    assert words in answer[1]


def test_healthz_fails_when_the_guard_itself_is_silent(port: Port) -> None:
    assert ask(f"{port.url}/healthz")[0] == 503
    port.status(age_s=120)
    code, words = ask(f"{port.url}/healthz")
    assert code == 503
    assert "written nothing for 2 min" in words


def test_with_a_token_only_health_and_the_empty_page_are_open(locked_port: Port) -> None:
    locked_port.status()
    for path in ("/data", "/data?range=1h", "/metrics", "/status"):
        assert ask(locked_port.url + path)[0] == 401
        assert ask(locked_port.url + path, "wrong")[0] == 401
        assert ask(locked_port.url + path, TOKEN)[0] == 200
    assert ask(locked_port.url + "/no-such-address")[0] == 401
    for path in ("/healthz", "/"):
        assert ask(locked_port.url + path)[0] == 200
    assert ask(locked_port.url + "/../guard.jsonl", TOKEN)[0] == 404


def test_a_web_page_that_rebinds_its_name_to_the_port_reads_nothing(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DNS rebinding, the browser of someone with a tunnel could show all of /status to a
    hostile page."""
    port.status(command=["python", "miner.py", "--wallet", "planted"])
    hosts = ("evil.example", "evil.example:9123", "127.0.0.1:evil.example", "", "x" * 300)
    for host, path in itertools.product(hosts, ("/", "/metrics", "/status", "/healthz", "/data")):
        code, words = ask(port.url + path, host=host)
        assert code == 421
        assert "planted" not in words
        assert "set [http] token" in words
    monkeypatch.setattr("miner_guard.show.http.host_is_trusted", lambda _: True)
    assert "planted" in ask(f"{port.url}/status", host="evil.example")[1], "the attack works"


@pytest.mark.parametrize("window", ["from=0&to=1e308", "from=nan&to=9", "from=9&to=1", "from=x"])
def test_times_that_are_none_are_refused(port: Port, window: str) -> None:
    assert ask(f"{port.url}/data?{window}")[0] == 400
    assert ask(f"{port.url}/data?from=1700000000&to=1700000900")[0] == 200


def test_the_curves_may_be_left_out(port: Port) -> None:
    port.status()
    whole, rest = (json.loads(ask(f"{port.url}/data{query}")[1]) for query in ("", "?curves=0"))
    assert set(whole) - set(rest) == {"curves", "outages", "milestones"}


def test_a_request_that_fails_is_answered_and_logged_once(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback once went to a logger that nobody reads, so a page that now and then answered
    500 never said why."""

    def fail(*_: object, **__: object) -> None:
        raise LookupError("no such section")

    monkeypatch.setattr(http.page, "document", fail)
    assert {ask(f"{port.url}/data")[0] for _ in range(2)} == {500}
    (report,) = port.reports
    assert report.text.startswith("GUARD DEGRADED: HTTP /data failed: LookupError: no such section")
    assert ask(f"{port.url}/healthz")[0] == 503


def test_addresses_and_localhost_are_answered(port: Port) -> None:
    port.status()
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:9123", "[::1]:9123", "10.0.0.7"):
        assert ask(f"{port.url}/status", host=host)[0] == 200, host


def test_with_a_token_the_port_answers_to_any_host_name(locked_port: Port) -> None:
    """No page knows the token, and Prometheus may reach a miner by any name."""
    locked_port.status()
    assert ask(f"{locked_port.url}/status", TOKEN, host="miner-7.example")[0] == 200


def test_nothing_can_be_changed_through_the_port(port: Port) -> None:
    port.status()
    for method, path in itertools.product(("POST", "PUT", "DELETE", "PATCH"), ("/", "/status")):
        request = urllib.request.Request(port.url + path, data=b"{}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 405
        assert "Access-Control-Allow-Origin" not in refused.value.headers
        assert ask(port.url + path)[0] == 200, "only the method is refused"


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


def test_an_attacker_is_disconnected_and_the_port_still_answers(port: Port) -> None:
    port.status()
    sockets = _attack(port.number)
    try:
        assert ask(f"{port.url}/healthz")[0] == 200
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


def test_training_continues_while_the_port_is_attacked(tmp_path: Path) -> None:
    """End to end: the supervised miner's steps stay on time with 200 hostile connections open."""
    requires.module("uvicorn")
    script = tmp_path / "train.py"
    script.write_text(
        "import time, miner_guard\nguard = miner_guard.init()\n"
        "for step in range(1, 121):\n    time.sleep(0.1)\n    guard.step(outer_step=1, "
        "inner_step=step, loss=1.0)\n"
        "guard.close(finished=True)\n"
    )
    with guarding(tmp_path) as guard:
        running = guard.start([sys.executable, str(script)], settings={"http.port": 0})
        sockets = _attack(_port_of(guard.state.root))
        assert all(one.getpeername() for one in sockets), "the attack works"
        assert running.wait(timeout=90) == 0
    for one in sockets:
        one.close()
    steps = status_of(guard.state.root)["steps"]
    assert steps["steps"] == 120
    assert steps["p50_s"] < 0.3


def _port_of(state: Path) -> int:
    url = until(lambda: (status_of(state).get("metrics") or {}).get("url"), 40, "the port")
    return int(str(url).rstrip("/").rsplit(":", 1)[1])


def test_the_root_lists_the_other_miners_of_this_machine_worst_first(
    port: Port, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [StateDir(port.state)]
    for name, colour in (("well", "green"), ("hung", "red")):
        found.append(StateDir(tmp_path / name))
        verdict = {"life": "training", "colour": colour, "cause": "a secret"}
        metrics = {"url": f"http://127.0.0.1/{name}"}
        document = {"state": "running", "name": name, "verdict": verdict, "metrics": metrics}
        write_status(found[-1].root, document)
    monkeypatch.setattr(http, "running_guards", lambda: found)
    rows = json.loads(ask(f"{port.url}/data")[1])["others"]
    assert [(row["name"], row["kind"], row["url"][-4:]) for row in rows] == [
        ("hung", "bad", "hung"),
        ("well", "good", "well"),
    ]
    assert "secret" not in str(rows), "each may have a token of its own"

    def broken() -> list[StateDir]:
        raise RuntimeError("processes came and went meanwhile")

    monkeypatch.setattr(http, "running_guards", broken)
    code, text = ask(f"{port.url}/data")
    assert (code, json.loads(text)["others"]) == (200, [])
    assert "processes came and went meanwhile" in port.reports[0].text
