"""Real pm2 with a separate home: whatever pm2 does, there are no orphans, never two guards, and
checkpoints if there was time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.guarded import MARK, REPO, Guarded, keepers, living, until
from tests.support import requires

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Pm2:
    """One pm2 daemon and the guard that it runs."""

    def __init__(self, guarded: Guarded, folder: Path) -> None:
        self.program = requires.tool("pm2")
        self.guarded = guarded
        self.checkpoint = folder / "checkpoint"
        self.env = {
            **os.environ,
            "PM2_HOME": str(folder / "pm2"),
            "PYTHONPATH": str(REPO),
            MARK: guarded.token,
            "MINER_GUARD_GPU__PREFLIGHT": "false",
            "MINER_GUARD_MINER__STOP_TIMEOUT_S": "10",
            "MINER_GUARD_RESTART__BACKOFF_S": "0.1",
        }
        self.file = folder / "ecosystem.config.json"
        app = {
            "name": "miner",
            "script": sys.executable,
            "interpreter": "none",
            "exec_mode": "fork",
            "instances": 1,
            "args": [
                "-u",
                "-m",
                "miner_guard",
                "run",
                "--state-dir",
                str(guarded.state.root),
                "--",
                *guarded.miner("graceful", 0.5, self.checkpoint),
            ],
            "treekill": False,
            "kill_timeout": 20000,
            "autorestart": True,
            "stop_exit_codes": [63, 64, 69, 75, 78],
            "min_uptime": "30s",
            "max_restarts": 10,
            "merge_logs": True,
            "out_file": str(guarded.output),
            "error_file": str(guarded.output),
            "vizion": False,
            "automation": False,
            "pmx": False,
        }
        self.file.write_text(json.dumps({"apps": [app]}))

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [self.program, *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=90,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout

    def start(self) -> None:
        self("start", str(self.file))
        self.ready(1)

    def ready(self, count: int) -> None:
        """Wait until the miner has started `count` times and can write its checkpoint."""
        needle = b"graceful ready"
        until(
            lambda: (
                self.guarded.output.exists()
                and self.guarded.output.read_bytes().count(needle) >= count
            ),
            60,
            f"start {count} of the miner: {self.guarded.tail()}",
        )

    @property
    def app(self) -> dict[str, Any]:
        listed = [a for a in json.loads(self("jlist").splitlines()[-1]) if a["name"] == "miner"]
        return dict(listed[0]) if listed else {}

    @property
    def checkpoints(self) -> int:
        return len(self.checkpoint.read_text().splitlines()) if self.checkpoint.exists() else 0

    @property
    def god(self) -> int:
        return int((Path(self.env["PM2_HOME"]) / "pm2.pid").read_text())

    def guards(self) -> list[int]:
        """The keepers; each one's guard runs the same command line."""
        runs = [pid for pid, words in living(self.guarded.token) if "miner_guard run" in words]
        return keepers(runs)

    def miners(self) -> list[int]:
        return [
            pid
            for pid, words in living(self.guarded.token)
            if "graceful.py" in words and "miner_guard" not in words
        ]

    def gone(self, seconds: float = 30) -> None:
        """Whether neither guard nor miner is alive."""
        until(
            lambda: not self.guards() and not self.miners(),
            seconds,
            f"all gone: {living(self.guarded.token)}",
        )


@pytest.fixture
def pm2(guarded: Guarded, tmp_path: Path) -> Iterator[Pm2]:
    pm2 = Pm2(guarded, tmp_path)
    yield pm2
    pm2("kill")


def test_stop_restart_and_delete_leave_one_guard_or_none_and_lose_no_checkpoint(pm2: Pm2) -> None:
    pm2.start()
    monitor = until(
        lambda: (pm2.app.get("pm2_env") or {}).get("axm_monitor") or None, 60, "values in pm2"
    )
    assert monitor["State"]["value"] == "running"
    miner = Path(f"/proc/{pm2.miners()[0]}/environ").read_bytes()
    assert b"NODE_CHANNEL_FD" not in miner
    assert b"pm_exec_path" not in miner
    pm2("restart", "miner")
    pm2.ready(2)
    assert pm2.checkpoints == 1
    assert len(pm2.guards()) == 1
    assert len(pm2.miners()) == 1
    pm2("stop", "miner")
    pm2.gone()
    assert pm2.checkpoints == 2
    assert pm2.app["pm2_env"]["status"] == "stopped"
    pm2("restart", str(pm2.file))
    pm2.ready(3)
    pm2("delete", "miner")
    pm2.gone()
    assert pm2.checkpoints == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_death_of_pm2s_daemon_stops_the_guard_cleanly(pm2: Pm2, number: int) -> None:
    pm2.start()
    os.kill(pm2.god, number)
    pm2.gone()
    assert pm2.guarded.named("miner_stopping")
    assert pm2.checkpoints == 1


def test_a_guard_killed_by_pm2_in_the_middle_of_a_stop_leaves_nothing(pm2: Pm2) -> None:
    pm2.start()
    guard = pm2.guards()[0]
    stop = subprocess.Popen([pm2.program, "stop", "miner"], env=pm2.env, stdout=subprocess.DEVNULL)
    pm2.guarded.wait_for("miner_stopping")
    os.kill(guard, signal.SIGKILL)
    stop.wait(60)
    pm2.gone()


def test_every_python_killed_at_once_as_subnet_38s_updater_does_comes_back_as_one_guard_with_one_miner(
    pm2: Pm2,
) -> None:
    pm2.start()
    before = [
        pid
        for pid, _ in living(pm2.guarded.token)
        if Path(f"/proc/{pid}/comm").read_text().startswith("python")
    ]
    assert {*pm2.guards(), *pm2.miners()} <= set(before)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    pm2.ready(2)
    until(lambda: len(pm2.guards()) == len(pm2.miners()) == 1, 30, "one guard with one miner")
    assert not set(before) & {pid for pid, _ in living(pm2.guarded.token)}


def test_two_stops_and_two_restarts_at_once(pm2: Pm2) -> None:
    pm2.start()
    twice = [
        subprocess.Popen([pm2.program, "restart", "miner"], env=pm2.env, stdout=subprocess.DEVNULL)
        for _ in "12"
    ]
    for one in twice:
        one.wait(90)
    assert pm2.checkpoints >= 1
    time.sleep(1)
    until(
        lambda: len(pm2.guards()) == 1 and len(pm2.miners()) == 1,
        60,
        f"one of each: {living(pm2.guarded.token)}",
    )
    twice = [
        subprocess.Popen([pm2.program, "stop", "miner"], env=pm2.env, stdout=subprocess.DEVNULL)
        for _ in "12"
    ]
    for one in twice:
        one.wait(90)
    pm2.gone()


def test_reload_is_a_restart_and_kill_stops_everything(pm2: Pm2) -> None:
    pm2.start()
    first = pm2.guards()
    pm2("reload", "miner")
    pm2.ready(2)
    assert len(pm2.guards()) == 1
    assert len(pm2.miners()) == 1
    assert pm2.guards() != first
    assert pm2.checkpoints == 1
    pm2("kill")
    pm2.gone()
    assert pm2.checkpoints == 2
    pm2.guarded.assert_nothing_left()
