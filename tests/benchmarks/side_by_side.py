"""`python -m tests.benchmarks.side_by_side`: the same child under miner-guard, pm2 alone and torchrun alone.

Seconds from the fault to the child's next first line, and processes left after the supervisor's own SIGKILL.
The child has one descendant in a session of its own, as a dataloader or a rank is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HANG_TIMEOUT_S = 3.0

_CHILD = r"""
import os, subprocess, sys, time
born, token, fault = sys.argv[1:4]
subprocess.Popen(["sleep", "600", ], start_new_session=True, env={**os.environ, "SIDE_BY_SIDE": token})
first = not os.path.exists(born)
with open(born, "a") as file:
    file.write(f"{time.time()} {os.getpid()}\n")
try:
    import miner_guard
    guard = miner_guard.init()
except ImportError:
    guard = None
for step in range(1, 6):
    time.sleep(0.05)
    if guard is not None:
        guard.step(outer_step=0, inner_step=step, loss=3.0)
if first and fault == "crash":
    open(born + ".fault", "w").write(str(time.time()))
    sys.exit(3)
if first and fault == "hang":
    open(born + ".fault", "w").write(str(time.time()))
time.sleep(600)
"""


class Contender:
    """One way to keep a child running."""

    def __init__(self, name: str, folder: Path, fault: str) -> None:
        self.name, self.folder, self.fault = name, folder, fault
        self.born = folder / "born"
        self.token = uuid.uuid4().hex
        script = folder / "child.py"
        script.write_text(_CHILD)
        self.child = [str(script), str(self.born), self.token, fault]
        self.env = {**os.environ, "PYTHONPATH": str(REPO), "SIDE_BY_SIDE": self.token}
        self.supervisor: int | None = None

    def start(self) -> None:
        """Start the supervisor over the child; sets `supervisor`."""
        python = [sys.executable, *self.child]
        if self.name == "miner-guard":
            settings = {
                "MINER_GUARD_RESTART__BACKOFF_S": "0", "MINER_GUARD_HANG__MIN_S": str(HANG_TIMEOUT_S),
                "MINER_GUARD_HANG__FACTOR": "1", "MINER_GUARD_HANG__FIRST_STEP_S": "60",
                "MINER_GUARD_MINER__STOP_TIMEOUT_S": "2", "MINER_GUARD_GPU__PREFLIGHT": "false",
            }  # fmt: skip
            line = [
                sys.executable,
                "-m",
                "miner_guard",
                "run",
                "--state-dir",
                str(self.folder / "state"),
                "--",
                *python,
            ]
            self._popen(line, {**self.env, **settings})
        elif self.name == "torchrun --max-restarts":
            line = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
                "--max-restarts=3", "--monitor-interval=0.1", *self.child,
            ]  # fmt: skip
            self._popen(line, self.env)
        else:
            self.env["PM2_HOME"] = str(self.folder / "pm2")
            app = {
                "name": "child",
                "script": sys.executable,
                "interpreter": "none",
                "args": self.child,
                "vizion": False,
            }
            (self.folder / "app.config.json").write_text(json.dumps({"apps": [app]}))
            subprocess.run(["pm2", "start", str(self.folder / "app.config.json")], env=self.env, capture_output=True)
            self.supervisor = int((self.folder / "pm2" / "pm2.pid").read_text())

    def _popen(self, line: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.supervisor = self.process.pid

    def births(self) -> list[tuple[float, int]]:
        if not self.born.exists():
            return []
        return [(float(t), int(p)) for t, p in (line.split() for line in self.born.read_text().splitlines())]

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
        if self.name == "pm2":
            subprocess.run(["pm2", "kill"], env=self.env, capture_output=True)
        elif self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.left():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def relaunch_s(contender: Contender) -> float | None:
    """Seconds from the fault to the next birth; None where there was none within 20 s."""
    contender.start()
    if not until(lambda: contender.births(), 60):
        return None
    if contender.fault == "sigkill":
        time.sleep(1.0)
        at = time.time()
        os.kill(contender.births()[0][1], signal.SIGKILL)
    else:
        marker = Path(f"{contender.born}.fault")
        until(lambda: marker.exists() and marker.read_text(), 60)
        at = float(marker.read_text())
    if not until(lambda: len(contender.births()) > 1, 20):
        return None
    return contender.births()[1][0] - at


def orphans(contender: Contender) -> int:
    """Processes left 6 s after the supervisor's own SIGKILL."""
    contender.start()
    until(lambda: len(contender.left()) >= 2, 60)
    assert contender.supervisor is not None
    os.kill(contender.supervisor, signal.SIGKILL)
    until(lambda: not contender.left(), 6)
    return len(contender.left())


def main() -> None:
    names = ["miner-guard", *(["pm2"] if shutil.which("pm2") else []), "torchrun --max-restarts"]
    print(
        f"| | crash -> relaunch | SIGKILL -> relaunch | hang ({HANG_TIMEOUT_S:g} s limit) -> relaunch "
        "| left after its own SIGKILL |"
    )
    print("|---|---|---|---|---|")
    for name in names:
        cells = []
        for fault in ("crash", "sigkill", "hang"):
            with tempfile.TemporaryDirectory() as folder:
                contender = Contender(name, Path(folder), fault)
                try:
                    seconds = relaunch_s(contender)
                finally:
                    contender.end()
                cells.append("never (20 s)" if seconds is None else f"{seconds:.2f} s")
        with tempfile.TemporaryDirectory() as folder:
            contender = Contender(name, Path(folder), "none")
            try:
                cells.append(str(orphans(contender)))
            finally:
                contender.end()
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\nNVRx's launcher is not measured here: it is not installed with the development extras.")


if __name__ == "__main__":
    main()
