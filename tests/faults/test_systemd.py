"""sd_notify, as systemd would hear it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from tests.faults.guarded import Guarded


def test_readiness_watchdog_and_stop_are_told_and_hidden_from_the_miner(guarded: Guarded, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
        guarded.start(["sh", "-c", "echo socket=$NOTIFY_SOCKET.; sleep 600"], env=env)
        heard: list[str] = []
        deadline = time.monotonic() + 30
        while sum(line == "WATCHDOG=1" for line in heard) < 3 and time.monotonic() < deadline:
            heard.append(systemd.recv(4096).decode())
        assert "READY=1" in heard
        assert any(line.startswith("STATUS=State running") for line in heard)
        assert sum(line == "WATCHDOG=1" for line in heard) == 3
        assert guarded.stop() == 0
        while "STOPPING=1" not in heard:
            heard.append(systemd.recv(4096).decode())
    assert "socket=." in guarded.tail()
    guarded.assert_nothing_left()
