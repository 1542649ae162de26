"""The supervisors we compare the guard with: each runs the same child, with the settings that its
manual recommends for a process tree."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
HANG_LIMIT_S = 3.0

_CHILD = r"""
import os, signal, subprocess, sys, time
folder, token, fault = sys.argv[1:4]
first = not os.path.exists(folder + "/born")
if fault == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600) # " + token]
# One like a dataloader, in a new session; one like a daemon, which has dropped its environment.
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(sleep, env={}, start_new_session=True)
    os._exit(0)
os.wait()
with open(folder + "/born", "a") as file:
    file.write(f"{time.time()} {os.getpid()}\n")
step_done = lambda step: None
if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    step_done = lambda step: client.send_heartbeat()
elif "_MINER_GUARD_RUN" in os.environ:
    import miner_guard
    guard = miner_guard.init()
    step_done = lambda step: guard.step(outer_step=0, inner_step=step, loss=3.0)
steps = open(folder + "/steps", "a", buffering=1)
for step in range(1, 10**6):
    time.sleep(0.05)
    step_done(step)
    print("step", step, flush=True)
    steps.write(f"{step}\n")
    if first and step == 20 and fault in ("crash", "hang"):
        with open(folder + "/fault", "w") as file:
            file.write(str(time.time()))
        if fault == "crash":
            sys.exit(3)
        time.sleep(600)
"""


class Birth(NamedTuple):
    """One start of the child."""

    at: float
    """Seconds since 1970."""

    pid: int


class Peer:
    """One supervisor and its child."""

    name = ""
    program = ""
    """The program that must be installed."""

    def __init__(self, folder: Path, logs: Path, fault: str) -> None:
        """`logs`: the folder for the peer's own files and the child's output."""
        self.folder, self.logs = folder, logs
        self.token = uuid.uuid4().hex
        script = folder / "child.py"
        script.write_text(_CHILD)
        self.child = [str(script), str(folder), self.token, fault]
        paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    @classmethod
    def missing(cls) -> str | None:
        """Why this peer can't run here."""
        return None if shutil.which(cls.program) else f"{cls.program} is not installed"

    def command(self) -> Sequence[str]:
        """The command that supervises the child in the foreground."""
        raise NotImplementedError

    def start(self, *, blocked: bool = False) -> None:
        """Start the peer; if `blocked`, from a parent that has blocked every signal."""

        def block() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

        with (self.logs / "output.log").open("wb") as out:
            self.process = subprocess.Popen(
                self.command(),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=block if blocked else None,
                cwd=self.folder,
            )

    @property
    def supervisor(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """Ask the peer to stop, as its manual says."""
        self.process.terminate()

    def births(self) -> list[Birth]:
        """All starts of the child."""
        path = self.folder / "born"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Birth(float(at), int(pid)) for at, pid in map(str.split, lines)]

    def failed(self) -> float | None:
        """When the child's own fault occurred, in seconds since 1970; None before that."""
        path = self.folder / "fault"
        return float(text) if path.exists() and (text := path.read_text()) else None

    def last_line(self) -> str:
        """The end of the output of a peer that did not start."""
        path = self.logs / "output.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "no output")[:120]

    def steps(self) -> int:
        """How many steps the child took across all its starts."""
        path = self.folder / "steps"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def left(self) -> set[int]:
        """The child's processes that are still alive, found by the token on their command lines."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                own = b"child.py" in b" ".join(words[:4]) or b"time.sleep" in b" ".join(words)
                launches = b"--" in words or any(b"torch" in w or b"nvidia" in w for w in words)
                token = any(self.token.encode() in word for word in words)
                if token and own and not launches and state not in "ZX":
                    found.add(int(name))
        return found

    def clean(self) -> None:
        """Clean up after a test, whatever its result."""
        for _ in range(3):
            with contextlib.suppress(OSError, ProcessLookupError, ValueError):
                os.kill(self.supervisor, signal.SIGKILL)
            for pid in self.left():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


class MinerGuard(Peer):
    name = "miner-guard"
    program = "true"

    def command(self) -> Sequence[str]:
        settings = {
            "RESTART__BACKOFF_S": 0,
            "HANG__MIN_S": HANG_LIMIT_S,
            "HANG__FACTOR": 1,
            "HANG__STACK_TIMEOUT_S": 3,
            "MINER__STOP_TIMEOUT_S": 2,
            "GPU__PREFLIGHT": "false",
        }
        self.env.update({f"MINER_GUARD_{key}": str(value) for key, value in settings.items()})
        run = ["-m", "miner_guard", "run", "--state-dir", str(self.logs / "state"), "--"]
        return [sys.executable, *run, sys.executable, *self.child]


class Supervisord(Peer):
    name = "supervisord"
    program = "supervisord"

    def command(self) -> Sequence[str]:
        conf = self.folder / "supervisord.conf"
        conf.write_text(
            f"[supervisord]\nnodaemon=true\nlogfile={self.logs}/main.log\n"
            f"pidfile={self.folder}/pid\n"
            f"[program:child]\ncommand={' '.join([sys.executable, *self.child])}\n"
            "autorestart=true\nstartsecs=0\nstopasgroup=true\nkillasgroup=true\nstopwaitsecs=2\n"
            f"redirect_stderr=true\nstdout_logfile={self.logs}/child.log\n"
        )
        return ["supervisord", "-c", str(conf)]


class Circus(Peer):
    name = "circus"
    program = "circusd"

    def command(self) -> Sequence[str]:
        conf = self.folder / "circus.ini"
        where = f"ipc://{self.folder}"
        conf.write_text(
            f"[circus]\nendpoint={where}/a\npubsub_endpoint={where}/b\n"
            f"[watcher:child]\ncmd={sys.executable}\nargs={' '.join(self.child)}\n"
            "copy_env=True\nstop_children=True\ngraceful_timeout=2\nmax_retry=-1\n"
            f"stdout_stream.class=FileStream\nstdout_stream.filename={self.logs}/child.log\n"
        )
        return ["circusd", str(conf)]


class S6(Peer):
    name = "s6"
    program = "s6-svscan"

    def command(self) -> Sequence[str]:
        service = self.folder / "scan" / "child"
        service.mkdir(parents=True)
        run = service / "run"
        words = " ".join([sys.executable, *self.child])
        run.write_text(f"#!/bin/sh\nexec {words} >> {self.logs}/child.log 2>&1\n")
        run.chmod(0o755)
        (service / "timeout-kill").write_text("2000\n")
        return ["s6-svscan", str(service.parent)]

    def clean(self) -> None:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes()
                place = os.readlink(f"/proc/{name}/cwd")
                if words.startswith(b"s6-supervise") and place.startswith(str(self.folder)):
                    os.kill(int(name), signal.SIGKILL)
        super().clean()


class Pm2(Peer):
    name = "pm2"
    program = "pm2"

    def command(self) -> Sequence[str]:
        self.env["PM2_HOME"] = str(self.logs / "pm2")
        app = {
            "name": "child",
            "script": sys.executable,
            "interpreter": "none",
            "args": self.child,
            "vizion": False,
            "kill_timeout": 2000,
        }
        (self.folder / "app.config.json").write_text(json.dumps({"apps": [app]}))
        return ["pm2", "start", str(self.folder / "app.config.json")]

    @property
    def supervisor(self) -> int:
        return int((self.logs / "pm2" / "pm2.pid").read_text())

    def stop(self) -> None:
        line = "pm2 stop child; pm2 kill"
        out = subprocess.DEVNULL
        self.stopper = subprocess.Popen(["sh", "-c", line], env=self.env, stdout=out, stderr=out)


class Torchrun(Peer):
    name = "torchrun"
    program = "true"
    _module = "torch.distributed.run"
    _more: Sequence[str] = ()

    def command(self) -> Sequence[str]:
        often = ["--standalone", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
        return [sys.executable, "-m", self._module, *often, *self._more, *self.child]


class Nvrx(Torchrun):
    name = "NVRx"
    _module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    _more = (
        "--ft-workload-check-interval=0.5",
        f"--ft-rank-heartbeat-timeout={HANG_LIMIT_S}",
        "--ft-initial-rank-heartbeat-timeout=60",
    )

    @classmethod
    def missing(cls) -> str | None:
        found = importlib.util.find_spec("nvidia_resiliency_ext")
        return None if found else "nvidia-resiliency-ext is not installed"


PEERS: tuple[type[Peer], ...] = (MinerGuard, Pm2, Supervisord, Circus, S6, Torchrun, Nvrx)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait for the condition; returns whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
