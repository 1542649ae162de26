"""`python -m tests.benchmarks.side_by_side [NAME…]`: the same child under miner-guard and under
what others use.

Seconds from the fault to the child's next first line, and processes left after the supervisor's own
SIGKILL. The child has one descendant in a session of its own, as a dataloader or a rank is. It
beats for anyone who listens: miner-guard's hook, NVRx's client. A contender that can't be had here
says why in its row.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HANG_TIMEOUT_S = 3.0
FAULTS = ("crash", "sigkill", "hang")

_CHILD = r"""
import os, subprocess, sys, time
born, token, fault = sys.argv[1:4]
subprocess.Popen(["sleep", "600"], start_new_session=True,
                 env={**os.environ, "SIDE_BY_SIDE": token})
first = not os.path.exists(born)
with open(born, "a") as file:
    file.write(f"{time.time()} {os.getpid()}\n")
if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    step_done = lambda step: client.send_heartbeat()
else:
    import miner_guard
    guard = miner_guard.init()
    step_done = lambda step: guard.step(outer_step=0, inner_step=step, loss=3.0)
for step in range(1, 6):
    time.sleep(0.05)
    step_done(step)
if first and fault != "none":
    open(born + ".fault", "w").write(str(time.time()))
    if fault == "crash":
        sys.exit(3)
time.sleep(600)
"""


class Contender:
    """One way to keep a child running."""

    name = ""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder, self.fault = folder, fault
        self.born = folder / "born"
        self.token = uuid.uuid4().hex
        script = folder / "child.py"
        script.write_text(_CHILD)
        self.child = [str(script), str(self.born), self.token, fault]
        self.env = {**os.environ, "PYTHONPATH": str(REPO), "SIDE_BY_SIDE": self.token}
        self.output = folder / "output.log"

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be measured on this machine."""
        return None

    def command(self) -> Sequence[str]:
        """What supervises the child."""
        raise NotImplementedError

    def start(self) -> None:
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                self.command(), env=self.env, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def supervisor(self) -> int:
        return self.process.pid

    def births(self) -> list[tuple[float, int]]:
        if not self.born.exists():
            return []
        return [
            (float(t), int(p))
            for t, p in (line.split() for line in self.born.read_text().splitlines())
        ]

    def left(self) -> list[int]:
        """Living processes of the child's, not the supervisor's own."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes()
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                ours = self.token.encode() in Path(f"/proc/{name}/environ").read_bytes()
                if ours and state not in "ZX" and (b"child.py" in words or b"sleep" in words):
                    found.append(int(name))
        return [pid for pid in found if pid != self.supervisor]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.left():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class MinerGuard(Contender):
    name = "miner-guard"

    def command(self) -> Sequence[str]:
        settings = {
            "RESTART__BACKOFF_S": 0,
            "HANG__MIN_S": HANG_TIMEOUT_S,
            "HANG__FACTOR": 1,
            "HANG__STACK_TIMEOUT_S": 3,
            "MINER__STOP_TIMEOUT_S": 2,
            "GPU__PREFLIGHT": "false",
        }
        self.env.update({f"MINER_GUARD_{key}": str(value) for key, value in settings.items()})
        run = [
            "-m",
            "miner_guard",
            "run",
            "--state-dir",
            str(self.folder / "state"),
            "--",
            sys.executable,
        ]
        return [sys.executable, *run, *self.child]


class Torchrun(Contender):
    name = "torchrun --max-restarts"
    _LAUNCHER: Sequence[str] = (sys.executable, "-m", "torch.distributed.run")

    def command(self) -> Sequence[str]:
        often = ["--standalone", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
        return [*self._LAUNCHER, *often, *self.child]


class Nvrx(Torchrun):
    name = "NVRx's ft_launcher"
    _LAUNCHER = (
        sys.executable,
        "-m",
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        "--ft-workload-check-interval=0.5",
        f"--ft-rank-heartbeat-timeout={HANG_TIMEOUT_S}",
        "--ft-initial-rank-heartbeat-timeout=60",
    )

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("nvidia_resiliency_ext") is None:
            return "not installed: pip install --no-deps nvidia-resiliency-ext defusedxml pyyaml"
        return None


class Supervisord(Contender):
    name = "supervisord"

    @classmethod
    def missing(cls) -> str | None:
        return (
            None
            if importlib.util.find_spec("supervisor")
            else "not installed: pip install supervisor"
        )

    def command(self) -> Sequence[str]:
        settings = self.folder / "supervisord.conf"
        words = " ".join([sys.executable, *self.child])
        settings.write_text(
            f"[supervisord]\nnodaemon=true\nlogfile=/dev/null\nlogfile_maxbytes=0\npidfile={self.folder}/pid\n"
            f"[program:child]\ncommand={words}\nautorestart=true\nstartsecs=0\nstdout_logfile={self.folder}/child.log\n"
        )
        return [sys.executable, "-m", "supervisor.supervisord", "-c", str(settings)]


class Pm2(Contender):
    name = "pm2"

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("pm2") else "not installed: npm install -g pm2"

    def start(self) -> None:
        self.env["PM2_HOME"] = str(self.folder / "pm2")
        app = {
            "name": "child",
            "script": sys.executable,
            "interpreter": "none",
            "args": self.child,
            "vizion": False,
        }
        (self.folder / "app.config.json").write_text(json.dumps({"apps": [app]}))
        subprocess.run(
            ["pm2", "start", str(self.folder / "app.config.json")],
            env=self.env,
            capture_output=True,
        )

    @property
    def supervisor(self) -> int:
        return int((self.folder / "pm2" / "pm2.pid").read_text())

    def end(self) -> None:
        subprocess.run(["pm2", "kill"], env=self.env, capture_output=True)
        for pid in self.left():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        with contextlib.suppress(OSError, ValueError):
            return super().left()
        return []


CONTENDERS: tuple[type[Contender], ...] = (MinerGuard, Pm2, Supervisord, Torchrun, Nvrx)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def relaunch(contender: Contender) -> str:
    """Seconds from the fault to the next birth, in words."""
    contender.start()
    marker = Path(f"{contender.born}.fault")
    if not until(contender.births, 60):
        return f"did not start: {_last_line(contender)}"
    if not until(lambda: marker.exists() and marker.read_text(), 60):
        return f"its child did not work: {_last_line(contender)}"
    at = float(marker.read_text())
    if contender.fault == "sigkill":
        at = time.time()
        os.kill(contender.births()[0][1], signal.SIGKILL)
    if not until(lambda: len(contender.births()) > 1, 20):
        return "never (20 s)"
    return f"{contender.births()[1][0] - at:.2f} s"


def _last_line(contender: Contender) -> str:
    lines = (
        contender.output.read_text(errors="replace").splitlines()
        if contender.output.exists()
        else []
    )
    return next((line for line in reversed(lines) if line.strip()), "without a word")[:120]


def orphans(contender: Contender) -> str:
    """Processes left 6 s after the supervisor's own SIGKILL, in words."""
    contender.start()
    if not until(lambda: len(contender.left()) >= 2, 60):
        return f"did not start: {_last_line(contender)}"
    os.kill(contender.supervisor, signal.SIGKILL)
    until(lambda: not contender.left(), 6)
    return str(len(contender.left()))


def _cell(kind: type[Contender], fault: str, measure: Callable[[Contender], str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        contender = kind(Path(folder), fault)
        try:
            return measure(contender)
        finally:
            contender.end()


def main(names: Sequence[str]) -> None:
    hang = f"hang ({HANG_TIMEOUT_S:g} s limit) -> relaunch"
    print(f"| | crash -> relaunch | SIGKILL -> relaunch | {hang} | left after its own SIGKILL |")
    print("|---|---|---|---|---|")
    for kind in CONTENDERS:
        if names and kind.name not in names:
            continue
        reason = kind.missing()
        cells = (
            [reason, "", "", ""] if reason else [_cell(kind, fault, relaunch) for fault in FAULTS]
        )
        if not reason:
            cells.append(_cell(kind, "none", orphans))
        print(f"| {kind.name} | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
