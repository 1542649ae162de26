"""systemd: the sd_notify messages that it would receive, and the unit from ops/ under a real
systemd that is PID 1 in separate namespaces."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.checks.host import NOFILE
from tests.faults.guarded import MARK, REPO, Guarded, keepers, living, until

UNIT = REPO / "ops" / "miner-guard.service"
BIN = Path(sys.executable).parent
ALONE = [
    "unshare",
    "--pid",
    "--mount",
    "--uts",
    "--ipc",
    "--cgroup",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
CONTROL_GROUPS = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
"""Where cgroup v2 may be mounted."""
BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
umount -R /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /run/systemd/system
cp {unit} /run/systemd/system/
printf '[Unit]\\nDefaultDependencies=no\\nAllowIsolate=yes\\n' > /run/systemd/system/bare.target
export container=test
exec /lib/systemd/systemd --system --unit=bare.target --log-target=console --log-level=warning
"""


def test_readiness_watchdog_and_stop_are_reported_and_hidden_from_the_miner(
    guarded: Guarded, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
        guarded.start(["sh", "-c", "echo socket=$NOTIFY_SOCKET.; sleep 600"], env=env)
        heard: list[str] = []
        while (
            "READY=1" not in heard
            or heard.count("WATCHDOG=1") < 3
            or not any(line.startswith("STATUS=State running") for line in heard)
        ):
            heard.append(systemd.recv(4096).decode())
        assert guarded.stop() == 0
        while "STOPPING=1" not in heard:
            heard.append(systemd.recv(4096).decode())
    assert "socket=." in guarded.tail()
    guarded.assert_nothing_left()


class Systemd:
    """The unit from ops/ with this test's paths and shorter times, under a private systemd."""

    def __init__(self, guarded: Guarded, folder: Path, miner: list[str]) -> None:
        self.guarded, self.folder = guarded, folder
        self.settings = folder / "miner-guard.env"
        self.unit = folder / UNIT.name
        # Its slices are in the test's own control group, which can be removed with everything in
        # it.
        root = next((root for root in CONTROL_GROUPS if (root / "cgroup.procs").exists()), None)
        if root is None:
            pytest.skip("there are no control groups of version 2")
        self._group = root / f"miner-guard-test-{guarded.token}"
        self.set()
        self.unit.write_text(self._edited(shlex.join(miner)))

    def set(self, **settings: object) -> None:
        """Write the file that the unit's EnvironmentFile names."""
        own = {
            "MINER_GUARD_STATE_DIR": self.guarded.state.root,
            "PYTHONPATH": REPO,
            MARK: self.guarded.token,
            "MINER_GUARD_GPU__PREFLIGHT": "false",
            "MINER_GUARD_MINER__STOP_TIMEOUT_S": 5,
        }
        self.settings.write_text(
            "".join(f"{name}={value}\n" for name, value in {**own, **settings}.items())
        )

    def _edited(self, miner: str) -> str:
        """The unit as a person would edit it, with times that a test can wait for; every edited
        line must exist."""
        text, writable = UNIT.read_text(), f"{self.folder} {self.guarded.state.root.parent}"
        output = f"StandardOutput=append:{self.guarded.output}\nStandardError=inherit\nLimitCORE=0"
        for pattern, new in (
            (r"^User=.*$", output),
            (r"^WorkingDirectory=.*$", f"WorkingDirectory={self.folder}"),
            (r"^EnvironmentFile=-.*$", f"EnvironmentFile=-{self.settings}"),
            (r"^ExecStart=/opt/miner/.venv/bin", f"ExecStart={BIN}"),
            (r"(?<= -- )torchrun .*$", miner),
            (r"^Environment=PATH=/opt/miner/.venv/bin:", f"Environment=PATH={BIN}:"),
            # This test's folders are in /tmp, and its user can read the others.
            (r"^ReadWritePaths=.*$", f"ReadWritePaths={writable}"),
            (r"^PrivateTmp=yes$", "PrivateTmp=no"),
            (r"^TimeoutStopSec=.*$", "TimeoutStopSec=20"),
            (r"^WatchdogSec=.*$", "WatchdogSec=6"),
            (r"^RestartSec=.*$", "RestartSec=1"),
            (r"^\[Unit\]$", "[Unit]\nDefaultDependencies=no"),
        ):
            text, lines = re.subn(pattern, lambda _, new=new: new, text, flags=re.MULTILINE)  # type: ignore[misc]
            assert lines == 1, pattern
        return text

    def boot(self) -> None:
        self._group.mkdir()
        script = BOOT.format(unit=self.unit)
        with (self.folder / "systemd.log").open("wb") as out:
            self.outer = subprocess.Popen(
                [*ALONE, "sh", "-c", script],
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=self._into_group,
            )
        try:
            until(
                lambda: self("is-system-running") in ("running", "degraded"), 60, "systemd to be up"
            )
        except AssertionError:
            pytest.skip(
                "systemd does not boot in a namespace here: "
                f"{(self.folder / 'systemd.log').read_text()[-300:]}"
            )

    def _into_group(self) -> None:
        (self._group / "cgroup.procs").write_text("0")

    def __call__(self, *words: str) -> str:
        """Run systemctl; returns its output."""
        try:
            inner = (
                Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text().split()
            )
        except OSError:
            return ""
        if not inner:
            return ""
        line = ["nsenter", "--all", "--target", inner[0], "systemctl", *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=60).stdout.strip()

    def show(self, name: str) -> str:
        return self("show", "--value", "-p", name, "miner-guard")

    def becomes(self, active: str, seconds: float = 60) -> None:
        until(
            lambda: self.show("ActiveState") == active,
            seconds,
            lambda: f"{active}: {self('status', 'miner-guard')} {self.guarded.tail()}",
        )

    def end(self) -> None:
        self.outer.kill()
        self.outer.wait(60)
        inside = sorted((path for path in self._group.rglob("*") if path.is_dir()), reverse=True)
        for path in [*inside, self._group]:
            until(lambda path=path: _removed(path), 60, f"{path} to be empty")  # type: ignore[misc]


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


@pytest.fixture
def systemd(guarded: Guarded, tmp_path: Path) -> Iterator[Systemd]:
    """A systemd that has not booted yet; its miner writes a checkpoint when it is told to stop."""
    # systemd is part of the machine, not something that the project can install: without it these
    # tests are skipped, even in CI.
    if shutil.which("systemd-analyze") is None or shutil.which("nsenter") is None:
        pytest.skip("systemd is not installed")
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces are not permitted here")
    if os.geteuid() != 0:
        pytest.skip("only root has control groups to give away")
    python, *words = guarded.miner("graceful", 0.5, tmp_path / "checkpoint")
    made = Systemd(guarded, tmp_path, [Path(python).name, *words])
    try:
        made.boot()
        yield made
    finally:
        made.end()


def _keepers(guarded: Guarded) -> list[int]:
    """The processes that systemd started; a guard runs the same command line in its own
    session."""
    runs = [
        pid for pid, words in living(guarded.token) if "graceful.py" in words and " run " in words
    ]
    return keepers(runs)


def test_the_unit_is_well_formed(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/miner/.venv/bin", str(BIN)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_leaves_an_intruder_little(tmp_path: Path) -> None:
    """A miner runs its dependencies' code, so the unit must expose only what training needs."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    careless = tmp_path / "careless.service"
    careless.write_text("[Service]\nExecStart=/usr/bin/true\n")
    check = ["systemd-analyze", "security", "--offline=yes", "--threshold=40", "--no-pager"]
    ours, theirs = (
        subprocess.run([*check, str(unit)], capture_output=True, text=True)
        for unit in (UNIT, careless)
    )
    assert ours.returncode == 0, ours.stdout[-400:]
    assert theirs.returncode, "a unit without the defences fails"


@pytest.mark.slow
def test_the_unit_starts_stops_cleanly_and_restarts_after_a_kill(
    systemd: Systemd, guarded: Guarded
) -> None:
    systemd("start", "miner-guard")
    systemd.becomes("active")
    until(lambda: "State running" in systemd.show("StatusText"), 60, "the status line")
    until(lambda: guarded.output.read_bytes().count(b"graceful ready") == 1, 60, "the miner")
    (guard,) = _keepers(guarded)
    assert resource.prlimit(guard, resource.RLIMIT_NOFILE)[0] >= NOFILE, (
        "the doctor does not complain of our own unit"
    )
    assert (systemd.show("LimitMEMLOCK"), systemd.show("OOMPolicy")) == ("infinity", "continue")
    os.kill(guard, signal.SIGKILL)
    until(lambda: guarded.output.read_bytes().count(b"graceful ready") == 2, 60, guarded.tail)
    assert systemd.show("NRestarts") == "1"
    assert len(_keepers(guarded)) == 1
    # If a guard is wedged, the watchdog ends it, and a new guard ends the remaining processes.
    os.kill(_keepers(guarded)[0], signal.SIGSTOP)
    until(lambda: guarded.output.read_bytes().count(b"graceful ready") == 3, 90, guarded.tail)
    assert systemd.show("NRestarts") == "2"
    assert not (systemd.folder / "checkpoint").exists()
    systemd("stop", "miner-guard")
    systemd.becomes("inactive")
    assert (systemd.folder / "checkpoint").read_text() == "checkpoint SIGTERM\n"
    assert systemd.show("Result") == "success"
    guarded.assert_nothing_left()


@pytest.mark.slow
def test_the_unit_does_not_restart_what_a_restart_cant_fix(
    systemd: Systemd, guarded: Guarded
) -> None:
    systemd.set(MINER_GUARD_GATE__MIN_INNER_STEP="many")
    systemd("start", "miner-guard")
    systemd.becomes("failed")
    time.sleep(2)
    assert systemd.show("ExecMainStatus") == "78"
    assert systemd.show("NRestarts") == "0"
    guarded.assert_nothing_left()
