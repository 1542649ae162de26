"""The miner's output through the guard, beside a plain file and pm2: wall time as a ratio, CPU per MB."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.frame import Row

TITLE = "The relay, 80-byte lines, wall against direct-to-file"

_MEGABYTES = 80
_WRITER = r"""
import json, os, sys, time
size, done = int(sys.argv[1]), sys.argv[2]
line = b"2026-01-02 03:04:05 | INFO | Rank 0 | Outer Step: 1 | Inner Step: 5 | Loss: 3.4\n"
block = line * max(1, size // len(line))
start = time.monotonic()
for _ in range(int(sys.argv[3]) * 1000000 // len(block)):
    data = block
    while data:
        data = data[os.write(1, data):]
json.dump({"wall": time.monotonic() - start, "cpu": time.process_time()}, open(done, "w"))
"""


@dataclass(frozen=True)
class Figure:
    """One way to carry the output."""

    wall_s: float
    cpu_s: float | None
    """Of the carrier alone, without the writer's."""


def run() -> list[Row]:
    """Both ways of writing through each carrier; the ratios are to the plain file in the same run."""
    rows: list[Row] = []
    for name, size, target in (("one write per line", 1, "<= 1.0 x"), ("64 KiB writes", 65536, "<= 1.6 x")):
        with tempfile.TemporaryDirectory() as folder:
            rows += _compare(Path(folder), name, size, target)
    return rows


def _compare(folder: Path, name: str, size: int, target: str) -> list[Row]:
    script = folder / "writer.py"
    script.write_text(_WRITER)
    direct = _direct(folder, script, size)
    guard = _guard(folder, script, size)
    pm2 = _pm2(folder, script, size)
    note = f"direct {_MEGABYTES / direct.wall_s:.0f} MB/s"
    rows = [Row(f"{name}: guard", guard.wall_s / direct.wall_s, "x", target, note)]
    if pm2 is not None:
        rows.append(Row(f"{name}: pm2", pm2.wall_s / direct.wall_s, "x", "", "the same writer under pm2"))
    assert guard.cpu_s is not None
    against = "" if pm2 is None or not pm2.cpu_s else f"pm2: {1000 * pm2.cpu_s / _MEGABYTES:.1f} ms"
    rows.append(Row(f"{name}: CPU of the guard", 1000 * guard.cpu_s / _MEGABYTES, "ms/MB", "<= half of pm2's", against))
    return rows


def _said(path: Path) -> dict[str, float]:
    document: dict[str, float] = json.loads(path.read_text())
    return document


def _direct(folder: Path, script: Path, size: int) -> Figure:
    done = folder / "direct.json"
    with (folder / "direct.log").open("wb") as out:
        subprocess.run(
            [sys.executable, "-S", str(script), str(size), str(done), str(_MEGABYTES)], stdout=out, check=True
        )
    (folder / "direct.log").unlink()
    return Figure(_said(done)["wall"], None)


def _guard(folder: Path, script: Path, size: int) -> Figure:
    done = folder / "guard.json"
    command = [
        sys.executable, "-m", "miner_guard", "run", "--state-dir", str(folder / f"state-{size}"), "--no-restart",
        "--no-preflight", "--", sys.executable, "-S", str(script), str(size), str(done), str(_MEGABYTES),
    ]  # fmt: skip
    with (folder / "guard.log").open("wb") as out:
        guard = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, _, usage = os.wait4(guard.pid, 0)
        guard.returncode = 0
    (folder / "guard.log").unlink()
    idle = _start_cost(folder)
    own = usage.ru_utime + usage.ru_stime - _said(done)["cpu"] - idle
    return Figure(_said(done)["wall"], max(own, 0.0))


def _start_cost(folder: Path) -> float:
    """CPU of a guard over `true`: what is not the relay's."""
    command = [
        sys.executable, "-m", "miner_guard", "run", "--state-dir", str(folder / "idle"), "--no-restart",
        "--no-preflight", "--", "true",
    ]  # fmt: skip
    guard = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    _, _, usage = os.wait4(guard.pid, 0)
    guard.returncode = 0
    return usage.ru_utime + usage.ru_stime


def _pm2(folder: Path, script: Path, size: int) -> Figure | None:
    program = shutil.which("pm2")
    if program is None:
        return None
    home = folder / "pm2"
    env = {**os.environ, "PM2_HOME": str(home)}
    done = folder / "pm2.json"
    app = {
        "name": "writer", "script": sys.executable, "interpreter": "none", "autorestart": False, "merge_logs": True,
        "args": ["-S", str(script), str(size), str(done), str(_MEGABYTES)], "vizion": False, "pmx": False,
        "out_file": str(folder / "pm2.log"), "error_file": str(folder / "pm2.log"),
    }  # fmt: skip
    (folder / "app.config.json").write_text(json.dumps({"apps": [app]}))
    try:
        subprocess.run([program, "ping"], env=env, capture_output=True, check=True, timeout=60)
        god = int((home / "pm2.pid").read_text())
        before = _cpu_s(god)
        subprocess.run([program, "start", str(folder / "app.config.json")], env=env, capture_output=True, timeout=60)
        deadline = time.monotonic() + 120
        while not done.exists() or not done.read_text().endswith("}"):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        time.sleep(1.0)
        return Figure(_said(done)["wall"], _cpu_s(god) - before)
    finally:
        subprocess.run([program, "kill"], env=env, capture_output=True, timeout=60)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
