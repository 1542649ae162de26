"""The entry point of ops/Dockerfile as PID 1 of a PID namespace, as in a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.guarded import MARK, REPO, Guarded, living, until
from tests.support import requires

ALONE = ["unshare", "--fork", "--pid", "--mount-proc"]
ORPHANS = """
import os, signal, subprocess, time
signal.signal(signal.SIGUSR1, lambda *_: print("got it", flush=True))
for _ in range(5):
    if os.fork() == 0:
        subprocess.Popen(["sleep", "0.2"], start_new_session=True)
        os._exit(0)
    os.wait()
print("orphans made", flush=True)
while True:
    time.sleep(0.1)
"""


class Container:
    """The entry point, and its process as seen from the host."""

    def __init__(self, guarded: Guarded, *command: str, **settings: object) -> None:
        requires.tool("unshare")
        if subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
            pytest.skip("PID namespaces are not permitted here")
        entry = re.search(
            r"^ENTRYPOINT (\[.*\])$", (REPO / "ops" / "Dockerfile").read_text(), re.MULTILINE
        )
        assert entry is not None
        program, *words = json.loads(entry[1])
        own = {f"MINER_GUARD_{name}": str(value) for name, value in settings.items()}
        env = {
            **os.environ,
            "MINER_GUARD_STATE_DIR": str(guarded.state.root),
            "MINER_GUARD_GPU__PREFLIGHT": "false",
            "MINER_GUARD_MINER__STOP_TIMEOUT_S": "3",
            "MINER_GUARD_RESTART__BACKOFF_S": "0.1",
            "PYTHONPATH": str(REPO),
            MARK: guarded.token,
            **own,
        }
        line = [*ALONE, requires.tool(program), *words, *command]
        with guarded.output.open("wb") as out:
            self.process = subprocess.Popen(line, env=env, stdout=out, stderr=subprocess.STDOUT)
        guarded.processes.append(self.process)

    @property
    def guard(self) -> int:
        """The guard's pid outside the namespace."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())


def test_it_reaps_forwards_signals_and_leaves_nothing(guarded: Guarded) -> None:
    container = Container(guarded, sys.executable, "-c", ORPHANS)
    until(lambda: b"orphans made" in guarded.output.read_bytes(), 60, "the miner")
    # The guard writes its log beside the run, so the miner's first line can come before it.
    until(lambda: guarded.named("guard_started"), 60, "the guard's first event")
    assert guarded.named("guard_started")[0]["pid"] == 1
    until(
        lambda: not any(words.startswith("sleep") for _, words in living(guarded.token)),
        60,
        "the orphans to end",
    )
    until(lambda: not _zombies_of(container.guard), 60, "the orphans to be reaped")
    os.kill(container.guard, signal.SIGUSR1)
    until(lambda: b"got it" in guarded.output.read_bytes(), 60, "the signal to reach the miner")
    # `docker stop`.
    os.kill(container.guard, signal.SIGTERM)
    assert container.process.wait(60) == 0
    guarded.assert_nothing_left()


def test_the_image_holds_what_installing_the_guard_needs(tmp_path: Path) -> None:
    """The image must not contain a clone's .venv, .git or state."""
    copied = re.findall(
        r"^COPY (.+) (\S+)$", (REPO / "ops" / "Dockerfile").read_text(), re.MULTILINE
    )
    for sources, target in copied:
        for source in map(REPO.joinpath, sources.split()):
            if source.is_dir():
                shutil.copytree(
                    source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, tmp_path / target)
    build = [
        sys.executable,
        "-c",
        "import setuptools; setuptools.setup()",
        "--quiet",
        "build",
        "--build-lib",
        "built",
    ]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=120)
    packages = ["miner_guard", "monitoring_cost_tracker.py"]
    listed = [requires.tool("git"), "ls-files", *packages]
    tracked = subprocess.run(
        listed, cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    built = {str(path.relative_to(tmp_path / "built")) for path in (tmp_path / "built").rglob("*")}
    assert {name for name in tracked if not name.endswith((".c", ".h"))} - built == set()


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"MINER__FINITE": "true"}, 0), ({"RESTART__MAX_RESTARTS": 1}, 75), ({"GATE__MODE": 1}, 78)],
)
def test_the_containers_exit_code_is_the_guards(
    guarded: Guarded, settings: dict[str, object], code: int
) -> None:
    container = Container(guarded, "true", **settings)
    assert container.process.wait(60) == code, guarded.tail()
    guarded.assert_nothing_left()


def test_nothing_outlives_a_killed_container(guarded: Guarded) -> None:
    container = Container(guarded, *guarded.miner("process_tree", "stay"))
    until(lambda: b"family complete" in guarded.output.read_bytes(), 60, "the miner")
    assert len(living(guarded.token)) >= 8
    # `docker kill`.
    os.kill(container.guard, signal.SIGKILL)
    container.process.wait(60)
    guarded.assert_nothing_left()


def _zombies_of(guard: int) -> list[str]:
    listed = subprocess.run(
        ["ps", "--ppid", str(guard), "-o", "stat="], capture_output=True, text=True
    ).stdout
    return [state for state in listed.split() if state.startswith("Z")]
