"""The miner's output through the guard, compared with a plain file, `cat`, pm2 and supervisord:
wall time as a ratio, CPU per MB."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import statistics
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
_FLOOD_MEGABYTES = 400
"""More than the monitors' maximum backlog, so this measures sustained throughput."""

_ROUNDS = 5
_SETTLE_S = 3.0
"""The writer waits this long after its first line, because the guard's start, when it loads the
known errors, is not part of the relay's cost."""

_WRITER = r"""
import json, os, sys, time
size, done = int(sys.argv[1]), sys.argv[2]
line = b"2026-01-02 03:04:05 | INFO | Rank 0 | Outer Step: 1 | Inner Step: 5 | Loss: 3.4\n"
block = line * max(1, size // len(line))
os.write(1, line)
time.sleep(float(sys.argv[4]))
start = time.monotonic()
for _ in range(int(sys.argv[3]) * 1000000 // len(block)):
    data = block
    while data:
        data = data[os.write(1, data):]
json.dump({"wall": time.monotonic() - start, "cpu": time.process_time()}, open(done, "w"))
"""


@dataclass(frozen=True)
class Figure:
    """Figures for one way to carry the output."""

    wall_s: float
    cpu_s: float | None
    """CPU time of the carrier alone, without the writer."""


@dataclass(frozen=True)
class Load:
    """The writer's output, and where the writer reports the time."""

    folder: Path
    size: int
    """Bytes per write; 1 means one line."""

    megabytes: int

    def command(self, done: Path, settle_s: float = 0.0) -> list[str]:
        script = self.folder / "writer.py"
        script.write_text(_WRITER)
        # Python without `site`, because importing that takes longer than writing a megabyte.
        return [
            sys.executable,
            "-S",
            str(script),
            str(self.size),
            str(done),
            str(self.megabytes),
            str(settle_s),
        ]


def run() -> list[Row]:
    """Both ways of writing, through each carrier. Ratios for `cat` and the guard use the plain-file
    write of the same round."""
    rows: list[Row] = []
    for name, size, megabytes, target in (
        ("one write per line", 1, _MEGABYTES, "<= 1.0 x"),
        ("64 KiB writes", 65536, _MEGABYTES, "<= 2.5 x"),
        (f"64 KiB writes, {_FLOOD_MEGABYTES} MB", 65536, _FLOOD_MEGABYTES, ""),
    ):
        with tempfile.TemporaryDirectory() as folder:
            rows += _compare(Load(Path(folder), size, megabytes), name, target)
    return rows


def _compare(load: Load, name: str, target: str) -> list[Row]:
    idle, directs, cats, guards, ratios, floors = [], [], [], [], [], []
    for _ in range(_ROUNDS):
        idle.append(_start_cost(load.folder))
        directs.append(_direct(load))
        cats.append(_cat(load))
        guards.append(_guard(load))
        floors.append(cats[-1].wall_s / directs[-1].wall_s)
        ratios.append(guards[-1].wall_s / directs[-1].wall_s)
    direct_s = statistics.median(figure.wall_s for figure in directs)
    busy = os.getloadavg()[0]
    note = (
        f"{min(ratios):.2g}-{max(ratios):.2g}; direct {load.megabytes / direct_s:.0f} MB/s; "
        f"load {busy:.1f}"
    )
    rows = [
        Row(f"{name}: guard", statistics.median(ratios), "x", target, note),
        Row(
            f"{name}: `cat`",
            statistics.median(floors),
            "x",
            "",
            "the least that a process between the two costs",
        ),
    ]
    with_start_s = statistics.median(figure.cpu_s or 0.0 for figure in guards)
    cpu_s = max(with_start_s - statistics.median(idle), 0.0)
    pm2 = _pm2(load) if load.megabytes == _MEGABYTES else None
    if pm2 is not None:
        rows.append(
            Row(f"{name}: pm2", pm2.wall_s / direct_s, "x", "", "the same writer under pm2")
        )
    supervisord = _supervisord(load) if load.megabytes == _MEGABYTES else None
    if supervisord is not None:
        rows.append(
            Row(
                f"{name}: supervisord",
                supervisord.wall_s / direct_s,
                "x",
                "",
                _cpu_words(supervisord),
            )
        )
    against = (
        "" if pm2 is None or not pm2.cpu_s else f"pm2: {1000 * pm2.cpu_s / load.megabytes:.1f} ms"
    )
    target = "<= half of pm2's" if against else ""
    rows.append(
        Row(f"{name}: CPU of the guard", 1000 * cpu_s / load.megabytes, "ms/MB", target, against)
    )
    return rows


def _cpu_words(figure: Figure) -> str:
    return (
        "" if figure.cpu_s is None else f"{1000 * figure.cpu_s / _MEGABYTES:.1f} ms of CPU per MB"
    )


def _figures(path: Path) -> dict[str, float]:
    document: dict[str, float] = json.loads(path.read_text())
    return document


def _direct(load: Load) -> Figure:
    done = load.folder / "direct.json"
    with (load.folder / "direct.log").open("wb") as out:
        subprocess.run(load.command(done), stdout=out, check=True)
    (load.folder / "direct.log").unlink()
    return Figure(_figures(done)["wall"], None)


def _cat(load: Load) -> Figure:
    done = load.folder / "cat.json"
    with (load.folder / "cat.log").open("wb") as out:
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out)
        subprocess.run(load.command(done, 0.1), stdout=cat.stdin, check=True)
        cat.communicate()
    (load.folder / "cat.log").unlink()
    return Figure(_figures(done)["wall"], None)


def _guard(load: Load) -> Figure:
    """Carry the output through the guard. Its CPU time includes its start."""
    done = load.folder / "guard.json"
    command = [
        sys.executable,
        "-m",
        "miner_guard",
        "run",
        "--state-dir",
        str(load.folder / "state"),
        "--no-restart",
        "--no-preflight",
        "--",
        *load.command(done, _SETTLE_S),
    ]
    with (load.folder / "guard.log").open("wb") as out:
        guard = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, _, usage = os.wait4(guard.pid, 0)
        guard.returncode = 0
    (load.folder / "guard.log").unlink()
    own = usage.ru_utime + usage.ru_stime - _figures(done)["cpu"]
    return Figure(_figures(done)["wall"], own)


def _start_cost(folder: Path) -> float:
    """A guard's CPU time for one line and a `sleep`, to subtract from the relay's."""
    command = [
        sys.executable,
        "-m",
        "miner_guard",
        "run",
        "--state-dir",
        str(folder / "idle"),
        "--no-restart",
        "--no-preflight",
        "--",
        "sh",
        "-c",
        f"echo; sleep {_SETTLE_S}",
    ]
    guard = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    _, _, usage = os.wait4(guard.pid, 0)
    guard.returncode = 0
    return usage.ru_utime + usage.ru_stime


def _pm2(load: Load) -> Figure | None:
    program = shutil.which("pm2")
    if program is None:
        return None
    folder, home = load.folder, load.folder / "pm2"
    env = {**os.environ, "PM2_HOME": str(home)}
    done = folder / "pm2.json"
    command = load.command(done)
    app = {
        "name": "writer",
        "script": command[0],
        "interpreter": "none",
        "autorestart": False,
        "merge_logs": True,
        "args": command[1:],
        "vizion": False,
        "pmx": False,
        "out_file": str(folder / "pm2.log"),
        "error_file": str(folder / "pm2.log"),
    }
    (folder / "app.config.json").write_text(json.dumps({"apps": [app]}))
    try:
        subprocess.run([program, "ping"], env=env, capture_output=True, check=True, timeout=60)
        god = int((home / "pm2.pid").read_text())
        before = _cpu_s(god)
        subprocess.run(
            [program, "start", str(folder / "app.config.json")],
            env=env,
            capture_output=True,
            timeout=60,
        )
        if not _until(lambda: done.exists() and done.read_text().endswith("}")):
            return None
        time.sleep(1.0)
        return Figure(_figures(done)["wall"], _cpu_s(god) - before)
    finally:
        subprocess.run([program, "kill"], env=env, capture_output=True, timeout=60)


def _supervisord(load: Load) -> Figure | None:
    """Carry the output through supervisord, which classifies nothing, so its CPU time is that of
    copying bytes. None if the package `supervisor` is missing."""
    if importlib.util.find_spec("supervisor") is None:
        return None
    folder = load.folder
    done, up, go = folder / "supervisord.json", folder / "up", folder / "go"
    words = shlex.join(load.command(done))
    # Its own start must not count, so the writer waits for a signal to begin.
    waits = folder / "waits.sh"
    waits.write_text(f"touch {up}\nwhile [ ! -e {go} ]; do sleep 0.05; done\nexec {words}\n")
    settings = folder / "supervisord.conf"
    settings.write_text(
        f"[supervisord]\nnodaemon=true\nlogfile=/dev/null\nlogfile_maxbytes=0\npidfile={folder}/supervisord.pid\n"
        "[program:writer]\ncommand=sh "
        f"{waits}\nautorestart=false\nstartsecs=0\nredirect_stderr=true\n"
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
        return Figure(_figures(done)["wall"], _cpu_s(program.pid) - before)
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
