"""The miner's output through the guard, beside a plain file, pm2 and supervisord: wall time as a ratio, CPU per MB."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
    supervisord = _supervisord(folder, script, size)
    note = f"direct {_MEGABYTES / direct.wall_s:.0f} MB/s"
    rows = [Row(f"{name}: guard", guard.wall_s / direct.wall_s, "x", target, note)]
    if pm2 is not None:
        rows.append(Row(f"{name}: pm2", pm2.wall_s / direct.wall_s, "x", "", "the same writer under pm2"))
    if supervisord is not None:
        rows.append(Row(f"{name}: supervisord", supervisord.wall_s / direct.wall_s, "x", "", _cpu_words(supervisord)))
    assert guard.cpu_s is not None
    against = "" if pm2 is None or not pm2.cpu_s else f"pm2: {1000 * pm2.cpu_s / _MEGABYTES:.1f} ms"
    rows.append(Row(f"{name}: CPU of the guard", 1000 * guard.cpu_s / _MEGABYTES, "ms/MB", "<= half of pm2's", against))
    return rows


def _cpu_words(figure: Figure) -> str:
    return "" if figure.cpu_s is None else f"{1000 * figure.cpu_s / _MEGABYTES:.1f} ms of CPU per MB"


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
        if not _until(lambda: done.exists() and done.read_text().endswith("}")):
            return None
        time.sleep(1.0)
        return Figure(_said(done)["wall"], _cpu_s(god) - before)
    finally:
        subprocess.run([program, "kill"], env=env, capture_output=True, timeout=60)


def _supervisord(folder: Path, script: Path, size: int) -> Figure | None:
    """It classifies nothing: its CPU is that of passing bytes on. None where the package `supervisor` is not there."""
    if importlib.util.find_spec("supervisor") is None:
        return None
    done, up, go = folder / "supervisord.json", folder / "up", folder / "go"
    words = " ".join([sys.executable, "-S", str(script), str(size), str(done), str(_MEGABYTES)])
    # Its own start must not count: the writer waits for a word.
    waits = folder / "waits.sh"
    waits.write_text(f"touch {up}\nwhile [ ! -e {go} ]; do sleep 0.05; done\nexec {words}\n")
    settings = folder / "supervisord.conf"
    settings.write_text(
        f"[supervisord]\nnodaemon=true\nlogfile=/dev/null\nlogfile_maxbytes=0\npidfile={folder}/supervisord.pid\n"
        f"[program:writer]\ncommand=sh {waits}\nautorestart=false\nstartsecs=0\nredirect_stderr=true\n"
        f"stdout_logfile={folder}/supervisord.log\nstdout_logfile_maxbytes=0\n"
    )
    line = [sys.executable, "-m", "supervisor.supervisord", "-c", str(settings)]
    program = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if not _until(up.exists):
            return None
        before = _cpu_s(program.pid)
        go.touch()
        if not _until(lambda: done.exists() and done.read_text().endswith("}")):
            return None
        time.sleep(1.0)
        return Figure(_said(done)["wall"], _cpu_s(program.pid) - before)
    finally:
        program.terminate()
        program.wait(30)
        for file in (up, go):
            file.unlink(missing_ok=True)


def _until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
