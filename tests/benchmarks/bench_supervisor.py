"""The supervisor: how soon it acts, and what it costs while idle."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.frame import Row
from tests.support.waiting import until

TITLE = "The supervisor"

_MINERS = Path(__file__).resolve().parent.parent / "faults" / "miners"
_IDLE_S = 60.0


def run() -> list[Row]:
    """Measure relaunch, hang, stop, start, memory and idle CPU."""
    return [
        _relaunch(),
        _hang(),
        _stop_of_fifty(),
        *map(_stop_of_deaf, (500, 3000)),
        _true(),
        *_commands(),
        *_idle(),
    ]


class Guard:
    """One guard in a fresh directory."""

    def __init__(self, folder: Path, command: list[str], *flags: str, **settings: object) -> None:
        self.state = folder / "state"
        env = {**os.environ, **{f"MINER_GUARD_{k.upper()}": str(v) for k, v in settings.items()}}
        line = [
            sys.executable,
            "-m",
            "miner_guard",
            "run",
            "--no-preflight",
            "--state-dir",
            str(self.state),
            *flags,
        ]
        self.process = subprocess.Popen(
            [*line, "--", *command], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=env
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.state / "guard.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [e for e in map(json.loads, lines) if e["event"] == name]

    def wait_for(self, name: str, count: int = 1, seconds: float = 60.0) -> dict[str, Any]:
        until(lambda: len(self.events(name)) >= count, seconds)
        return self.events(name)[count - 1]


@contextmanager
def _guard(command: list[str], *flags: str, **settings: object) -> Iterator[Guard]:
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard(Path(folder), command, *flags, **settings)
        try:
            yield guard
        finally:
            guard.process.terminate()
            guard.process.wait(60)


def _relaunch() -> Row:
    """Seconds from SIGKILL of the miner to the first line of the next launch, without backoff."""
    with tempfile.TemporaryDirectory() as folder:
        born = Path(folder) / "born"
        command = ["sh", "-c", f"date +%s.%N >> {born}; exec sleep 600"]
        times: list[float] = []
        with _guard(command, "--max-restarts", "20", restart__backoff_s=0) as guard:
            for round_ in range(10):
                started = guard.wait_for("miner_started", round_ + 1)
                until(lambda n=round_: born.exists() and len(born.read_text().splitlines()) > n)  # type: ignore[misc]
                killed = time.time()
                os.kill(started["pid"], signal.SIGKILL)
                until(lambda n=round_: len(born.read_text().splitlines()) > n + 1)  # type: ignore[misc]
                times.append(float(born.read_text().splitlines()[-1]) - killed)
    worst = f"worst of {len(times)}: {max(times) * 1000:.0f} ms; torchrun alone 120 ms"
    return Row(
        "death -> relaunch, no backoff", statistics.median(times) * 1000, "ms", "<= 100 ms", worst
    )


def _hang() -> Row:
    """Seconds from the end of the last step to HANG DETECTED, beyond the timeout of 3 s."""
    command = [sys.executable, str(_MINERS / "steps.py"), "5", "0.05", "hang", "bench"]
    with _guard(command, hang__min_s=3, hang__factor=1, hang__action="warn") as guard:
        late = guard.wait_for("hang_detected")["idle_s"] - 3.0
    return Row(
        "hang -> noticed, beyond the timeout", late, "s", "<= 0.5 s", "NVRx: 1 s beyond its 3 s"
    )


def _stop_of_fifty() -> Row:
    """Seconds from SIGTERM to the guard until it and a tree of 50 processes are gone."""
    code = (
        "import subprocess, time; c = [subprocess.Popen(['sleep', '600']) for _ in "
        "range(49)]; time.sleep(600)"
    )
    with _guard([sys.executable, "-c", code]) as guard:
        pid = guard.wait_for("miner_started")["pid"]
        children = Path(f"/proc/{pid}/task/{pid}/children")
        until(lambda: len(children.read_text().split()) == 49)
        asked = time.monotonic()
        guard.process.terminate()
        guard.process.wait(60)
        return Row(
            "stop of 50 processes whose launcher leaves them",
            time.monotonic() - asked,
            "s",
            "",
            "verified gone",
        )


def _stop_of_deaf(children: int) -> Row:
    """Seconds from SIGTERM to the guard until it and children that ignore SIGTERM are gone."""
    miner = [sys.executable, str(_MINERS / "deaf.py"), str(children), "bench"]
    with _guard(miner, miner__stop_timeout_s=1) as guard:
        pid = guard.wait_for("miner_started")["pid"]
        below = Path(f"/proc/{pid}/task/{pid}/children")
        until(lambda: len(below.read_text().split()) == children)
        asked = time.monotonic()
        guard.process.terminate()
        guard.process.wait(120)
        return Row(
            f"stop of {children} deaf processes",
            time.monotonic() - asked,
            "s",
            "<= 10 s",
            "of it 1 s grace, 2 s from SIGTERM to SIGKILL",
        )


def _true() -> Row:
    """`miner-guard run -- true`, from start to end."""
    times = []
    for _ in range(5):
        start = time.monotonic()
        with _guard(["true"], "--no-restart") as guard:
            guard.process.wait(60)
            times.append(time.monotonic() - start)
    return Row(
        "miner-guard run -- true",
        statistics.median(times),
        "s",
        "",
        f"fastest of 5: {min(times):.2f} s",
    )


def _commands() -> list[Row]:
    """CPU time of complete commands with all their processes: the lowest of several runs, because
    other work on the machine can only add time."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        state = ["--state-dir", folder]
        for words, target in (
            (["run", "--no-preflight", "--no-restart", *state, "--", "true"], "<= 0.5 s"),
            (["logs", *state], "<= 0.15 s"),
            (["status", *state], "<= 0.15 s"),
        ):
            # With bytecode, as in an installation: an environment may forbid writing it.
            env = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            _command_cpu_s(words, env)
            least = min(_command_cpu_s(words, env) for _ in range(7))
            rows.append(Row(f"CPU of `{words[0]}`", least, "s", target, "least of 7"))
    return rows


def _command_cpu_s(words: list[str], env: Mapping[str, str]) -> float:
    quiet = subprocess.DEVNULL
    command = subprocess.Popen(
        [sys.executable, "-m", "miner_guard", *words], stdout=quiet, stderr=quiet, env=env
    )
    _, _, usage = os.wait4(command.pid, 0)
    command.returncode = 0
    return usage.ru_utime + usage.ru_stime


def _idle() -> list[Row]:
    """Resident memory and CPU next to a miner that does nothing."""
    with _guard(["sleep", "600"]) as guard:
        guard.wait_for("miner_started")
        time.sleep(3.0)
        before, start = _cpu_s(guard.process.pid), time.monotonic()
        time.sleep(_IDLE_S)
        share = (_cpu_s(guard.process.pid) - before) / (time.monotonic() - start)
        resident = int(
            Path(f"/proc/{guard.process.pid}/statm").read_text().split()[1]
        ) * os.sysconf("SC_PAGE_SIZE")
    return [
        Row("resident memory", resident / 1e6, "MB", "<= 60 MB", "the supervisor's own process"),
        Row(
            "CPU while idle",
            100 * share,
            "% of a core",
            "<= 0.2 %",
            f"over {_IDLE_S:.0f} s; load {os.getloadavg()[0]:.1f}",
        ),
    ]


def _cpu_s(pid: int) -> float:
    """CPU seconds of the live threads, as counted by the scheduler: /proc/PID/stat counts in steps
    of 10 ms, a quarter of what an idle guard may use in 20 s."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A job's thread may end in the meantime.
        with suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9
