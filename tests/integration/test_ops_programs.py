"""Loads ops/ into the programs that it is meant for: Prometheus scrapes a real guard, logrotate
rotates pm2's log."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import guarding
from tests.servers.webhook import Webhook
from tests.support import requires
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library
from tests.support.launcher import free_port
from tests.support.present_state import status_of
from tests.support.waiting import until

__all__ = ["fake_nvml", "nvml_library"]

OPS = requires.REPO / "ops"
TOKEN = "token-of-the-test"
NOBODY = "127.0.0.1:1"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MINER = """
import time
import miner_guard

guard = miner_guard.init()
for step in range(1, 100_000):
    if step % 10 == 0:
        with guard.phase("inference"):
            time.sleep(0.01)
    time.sleep(0.2)
    guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-4)
"""


@pytest.fixture
def miner(tmp_path: Path, fake_nvml: FakeNvml) -> Iterator[str]:
    """`host:port` of a guard with two GPUs and a repo, whose miner is taking steps."""
    requires.module("uvicorn")
    fake_nvml.set(count=2)
    script, state, repo = tmp_path / "train.py", tmp_path / "state", tmp_path / "published"
    script.write_text(MINER)
    (repo / "epoch-3").mkdir(parents=True)
    (repo / "epoch-3" / "gradients.pt").write_text("gradients")
    (repo / "metadata.json").write_text(
        '{"run": 5, "outer_step": 3, "inner_step": 50, "peer_id": "p"}'
    )
    settings = {
        "http.port": 0,
        "http.token": TOKEN,
        "repo.kind": "local",
        "repo.path": repo,
        "health.snapshot_every_s": 1,
    }
    with guarding(tmp_path) as guard:
        guard.start([sys.executable, str(script)], settings=settings, env=fake_nvml.env)
        url = until(lambda: (status_of(state).get("metrics") or {}).get("url"), what="a port")
        yield urllib.parse.urlsplit(url).netloc
        guard.stop()


def _free_address() -> str:
    return f"127.0.0.1:{free_port()}"


class Prometheus:
    """The real server, with our configuration and targets; it sends its alerts only to
    `alertmanager`."""

    def __init__(self, folder: Path, target: str, alertmanager: str = NOBODY) -> None:
        program = requires.tool("prometheus")
        shutil.copy(OPS / "prometheus" / "rules.yml", folder)
        (folder / "miner-guard.token").write_text(TOKEN)
        text = (OPS / "prometheus" / "prometheus.yml").read_text()
        text = text.replace("15s", "1s").replace(
            '["miner-1:9838", "miner-2:9838"]', f'["{target}"]'
        )
        text = text.replace("localhost:9093", alertmanager)
        assert target in text
        assert alertmanager in text
        (folder / "prometheus.yml").write_text(text)
        self.address = _free_address()
        flags = [
            f"--web.listen-address={self.address}",
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
        ]
        self.process = subprocess.Popen([program, *flags], cwd=folder, stderr=subprocess.DEVNULL)
        until(self._ready, what="Prometheus to be ready")

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def prometheus(tmp_path: Path, miner: str) -> Iterator[Prometheus]:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    server = Prometheus(folder, miner)
    yield server
    server.close()


def test_prometheus_scrapes_the_guard_and_every_panel_of_the_dashboard_has_data(
    prometheus: Prometheus,
) -> None:
    def up() -> bool:
        return [target["health"] for target in prometheus.ask("targets")["activeTargets"]] == ["up"]

    until(up, what="the scrape with the token")
    board = json.loads((OPS / "grafana" / "miner-guard.json").read_text())
    asked = {
        t["expr"].replace("$instance", ".*").replace("$__rate_interval", "2m"): p["title"]
        for p in board["panels"]
        for t in p.get("targets", ())
        # Loki does not run here, and this miner is on no chain.
        if t["datasource"]["type"] == "prometheus" and "minerguard_chain_" not in t["expr"]
    }
    for expression, panel in asked.items():
        until(
            lambda e=expression: prometheus.ask("query", query=e)["result"],
            what=f"data for {panel}: {expression}",
        )  # type: ignore[misc]
    (variable,) = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable).groups()  # type: ignore[union-attr]
    assert prometheus.ask(f"label/{label}/values", **{"match[]": metric})

    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    until(
        lambda: all(
            rule["health"] == "ok"
            for group in prometheus.ask("rules")["groups"]
            for rule in group["rules"]
        ),
        what="every rule to be evaluated",
    )
    assert len(rules) == (OPS / "prometheus" / "rules.yml").read_text().count("- alert:")
    firing = [alert for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"]
    assert firing == [], "nothing is wrong with this miner"


def test_alertmanager_notifies_once_about_a_guard_that_does_not_answer(
    tmp_path: Path, webhook: Webhook
) -> None:
    program, address = requires.tool("prometheus-alertmanager"), _free_address()
    text = (OPS / "prometheus" / "alertmanager.yml").read_text()
    text = text.replace("https://receiver.example", f"http://{webhook.address}").replace(
        "10s", "1s"
    )
    (tmp_path / "alertmanager.yml").write_text(text)
    flags = [
        "--config.file=alertmanager.yml",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    manager = subprocess.Popen(
        [program, *flags, "--storage.path=alerts"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    server = Prometheus(tmp_path, NOBODY, address)
    try:
        rules = tmp_path / "rules.yml"
        rules.write_text(rules.read_text().replace("for: 2m", "for: 0s"))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: webhook.posted, what="the call")
    finally:
        server.close()
        manager.terminate()
        manager.wait(30)
    (path, body), *more = webhook.posted
    assert (path, more) == ("/hook", [])
    (alert,) = body["alerts"]
    assert alert["labels"]["alertname"] == "MinerGuardDown"
    assert (
        alert["annotations"]["summary"]
        == f"http://{NOBODY}/ the guard is not responding, or writes nothing"
    )


def _rotate(folder: Path, config: str) -> None:
    """Force a rotation with the real logrotate, which must first check the file without errors."""
    file = folder / "rotate.conf"
    file.write_text(config)
    file.chmod(0o600)
    logrotate = shutil.which("logrotate") or requires.tool("/usr/sbin/logrotate")
    for flags in (["--debug"], ["--force", "--verbose"]):
        command = [logrotate, *flags, "--state", str(folder / "rotate.state"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert not re.search("^error:", done.stderr, re.MULTILINE), done.stderr


def test_logrotate_rotates_what_pm2_writes_and_pm2_continues_in_a_new_file(tmp_path: Path) -> None:
    pm2, home = requires.tool("pm2"), tmp_path / "pm2"
    env = {**os.environ, "PM2_HOME": str(home)}
    (tmp_path / "miner.sh").write_text(
        "for n in $(seq 1 200000); do echo line $n; sleep 0.002; done\n"
    )

    def lines() -> list[int]:
        files = sorted(
            (home / "logs").glob("miner-out.log*"), key=lambda path: len(path.name), reverse=True
        )
        return [int(line.split()[1]) for file in files for line in file.read_text().splitlines()]

    subprocess.run(
        [pm2, "start", "miner.sh", "--name", "miner", "--interpreter", "bash"],
        env=env,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    try:
        until(lambda: len(lines()) > 100, what="lines")
        config = (OPS / "logrotate" / "miner-guard").read_text().replace("/root/.pm2", str(home))
        _rotate(tmp_path, config)
        out = home / "logs" / "miner-out.log"
        until(
            lambda: out.exists() and len(out.read_text().splitlines()) > 100,
            what="pm2 to write on in a new file",
        )
        assert out.with_name("miner-out.log.1").stat().st_size > 0
    finally:
        subprocess.run([pm2, "kill"], env=env, capture_output=True, timeout=60)
    written = lines()
    assert written == sorted(set(written))
    # When pm2 reopens its files, it drops lines that it has not written yet: a few at most.
    assert len(written) > 0.95 * written[-1]
