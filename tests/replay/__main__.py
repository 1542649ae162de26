"""Makes the recordings again: `python -m tests.replay [NAME…]`. Only needed for runs that the
stored recordings do not show; a new recording proves nothing about a change to the watchers. The
`simulated-` ones were made once, by a simulation that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.replay.record import RUNS, Recorder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "tests" / "integration" / "scripts"
MINERS = REPO / "tests" / "faults" / "miners"
LABELLED = REPO / "tests" / "unit" / "incidents"
TORCHRUN = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
AUTO = ("run", "--no-preflight", "--attach", "auto", "--max-restarts", "1", "--")
HOOK = ("run", "--no-preflight", "--max-restarts", "1", "--")
QUICK = {
    "HANG__MIN_S": "10",
    "HANG__FIRST_STEP_S": "60",
    "RESTART__BACKOFF_S": "0.5",
    "HEALTH__SNAPSHOT_EVERY_S": "5",
}

_PRINTS = """
import time
for step in range(1, 41):
    time.sleep({seconds})
    loss = 9.5 if step == 20 else 3.0 / step**0.2
    line = f"step {{step}}/40 | loss {{loss:.4f}} | lr 1.00e-04 | {{{seconds}*1000:.1f}}ms"
    print(line, flush=True)
    if step == 30: time.sleep({pause})
"""

_MONITORS = """
import time, miner_guard
guard = miner_guard.init()
tracker = miner_guard.get_global_tracker()
for step in range(1, 31):
    time.sleep(0.2)
    if step % 10 == 0:
        with tracker.track("evolution_snapshot"):
            time.sleep({seconds})
    guard.step(outer_step=1, inner_step=step, loss=3.0 / step**0.1, lr=1e-4)
guard.close(finished=True)
"""


def _demo(*faults: str, steps: int = 30, ranks: int = 2) -> tuple[str, ...]:
    command = ["demo", "--steps", str(steps), "--ranks", str(ranks)]
    for fault in faults:
        command += ["--fault", fault]
    return tuple(command)


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (*AUTO, "python", str(SCRIPTS / f"{name}.py"), *arguments)


COMMANDS: Mapping[str, tuple[str, ...]] = {
    "demo-well": _demo(steps=60),
    "demo-hang": _demo("hang@14:1"),
    "demo-hang-4": _demo("hang@10:2", ranks=4),
    "demo-exit0": _demo("exit0@14"),
    "demo-crash": _demo("crash@14:1"),
    "demo-sigkill": _demo("sigkill@14:0"),
    "demo-oom": _demo("oom@14:1"),
    "demo-nan": _demo("nan@14:1"),
    "demo-nan-crash": _demo("nan@14:0", "crash@20:1"),
    "demo-slow": _demo("slow@30:1", steps=45),
    "demo-cpu": _demo("cpu-fallback@12:1", steps=24),
    "demo-spike": _demo("spike@40:1", steps=60),
    "hook-plain": (*HOOK, "python", str(REPO / "examples" / "plain_loop.py")),
    "hook-fsdp2": (*HOOK, *TORCHRUN, str(REPO / "examples" / "fsdp2.py")),
    "hook-diloco": (*HOOK, *TORCHRUN, str(REPO / "examples" / "diloco.py")),
    "hook-straggler": (*HOOK, *TORCHRUN, str(MINERS / "straggling.py")),
    "hook-monitoring": (*HOOK, "python", "-c", _MONITORS.format(seconds=3.0)),
    "hook-monitoring-long": (*HOOK, "python", "-c", _MONITORS.format(seconds=40.0)),
    "auto-nanogpt": (*AUTO, "python", str(REPO / "examples" / "nanogpt.py")),
    "auto-plain": _script("plain"),
    "auto-ddp": (*AUTO, *TORCHRUN, str(SCRIPTS / "plain.py")),
    "auto-spawned": _script("spawned"),
    "auto-fsdp": (*AUTO, *TORCHRUN, str(SCRIPTS / "with_fsdp.py")),
    "auto-transformers": _script("with_transformers", "out"),
    "auto-lightning": _script("with_lightning"),
    "auto-accelerate": _script("with_accelerate"),
    "auto-gan": _script("gan"),
    "auto-mnist": _script("mnist"),
    "log-steps": (
        "run",
        "--no-preflight",
        "--attach",
        "log",
        "--max-restarts",
        "0",
        "--",
        "python",
        "-c",
        _PRINTS.format(seconds=0.3, pause=5),
    ),
    "log-hang": (
        "run",
        "--no-preflight",
        "--attach",
        "log",
        "--max-restarts",
        "0",
        "--",
        "python",
        "-c",
        _PRINTS.format(seconds=0.2, pause=60),
    ),
    "unhooked": (*HOOK, "python", "-c", _PRINTS.format(seconds=0.3, pause=1)),
}
LOGS = {
    f"log-{file}-{place}": (file, place)
    for file, place in (
        ("excerpts", 3),
        ("excerpts", 100),
        ("excerpts", 250),
        ("excerpts", 400),
        ("excerpts", 600),
        ("threads", 5),
        ("threads", 60),
        ("threads", 120),
        ("sixth_round", 20),
        ("sixth_round", 80),
    )
}
"""Files of labelled logs, and the place in them."""


def _run(name: str, command: tuple[str, ...]) -> None:
    command = tuple(sys.executable if word == "python" else word for word in command)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="run") as folder:
        settings = {f"MINER_GUARD_{key}": value for key, value in QUICK.items()}
        env = {**os.environ, **settings, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        env["MINER_GUARD_STATE_DIR"] = str(Path(folder) / "state")
        record = [sys.executable, "-m", "tests.replay.record", str(RUNS / name), "--", *command]
        with (Path(tempfile.gettempdir()) / f"replay-{name}.log").open("wb") as output:
            subprocess.run(record, env=env, cwd=folder, stdout=output, stderr=output, timeout=300)


def _log(name: str) -> None:
    """A miner that prints a labelled log, ten lines a second, and exits with code 1."""
    file, place = LOGS[name]
    text = tomllib.loads((LABELLED / f"{file}.toml").read_text(encoding="utf-8"))
    lines = text["excerpt"][place]["text"].splitlines(keepends=True)
    from miner_guard.config import Config

    now = [1000.0]
    recorder = Recorder(RUNS / f"{name}.jsonl.gz", monotonic=1000.0, wall=1767323045.0)
    recorder.begin(Config(), lambda: now[0])
    recorder.put("launch", {"command": ["train.py"], "pid": 1, "attempt": 0, "started": 1000.0})
    for start in range(0, len(lines), 5):
        recorder.put("out", "".join(lines[start : start + 5]))
        now[0] += 0.5
        recorder.put("tick", {})
    for _ in range(40):
        now[0] += 1.0
        recorder.put("tick", {})
    end = {"code": 1, "signal": None, "asked": False, "finished": False}
    recorder.put("exit", {**end, "runtime_s": now[0] - 1000.0})
    recorder.put("stop")
    recorder.close()


def main(chosen: list[str]) -> None:
    for name in chosen or [*COMMANDS, *LOGS]:
        if name in COMMANDS:
            _run(name, COMMANDS[name])
        else:
            _log(name)


if __name__ == "__main__":
    main(sys.argv[1:])
