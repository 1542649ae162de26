"""ops/sn38/README.md: its commands turn a miner started by run_miner.sh into a guarded one, and
back again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.test_pm2 import Pm2, pm2
from tests.support import requires
from tests.support.present_state import status_of
from tests.support.waiting import until

__all__ = ["pm2"]

IMITATION = Path(__file__).with_name("imitation")
WAY = (
    (requires.REPO / "ops" / "sn38" / "README.md")
    .read_text(encoding="utf-8")
    .partition("\n## What the guard sees")[0]
)
ARGUMENTS = "--netuid 38"
UPSTREAMS = "distributed_training_miner"

RUN_MINER = """
cat > app.config.js <<END
module.exports = {
  apps : [{
    name   : 'distributed_training_miner',
    script : 'neurons/miner.py',
    interpreter: 'torchrun',
    interpreter_args: '--nproc_per_node=1',
    min_uptime: '5m',
    max_restarts: '5',
    args: ['--netuid','38']
  }]
}
END
pm2 start app.config.js
"""
"""The part of upstream's script before its loop."""


def _commands(first: str) -> str:
    """The README block that contains this text, with a user's arguments and our names filled in."""
    (block,) = [
        block for block in re.findall(r"(?:^    .*\n)+", WAY, re.MULTILINE) if first in block
    ]
    lines = [line.strip() for line in block.splitlines() if not line.strip().startswith("pip ")]
    return (
        "\n".join(lines)
        .replace("--netuid 38 …", ARGUMENTS)
        .replace("…", ARGUMENTS)
        .replace("node=4", "node=1")
    )


class Clone:
    """The imitation, set up as a user's clone, with a separate pm2."""

    def __init__(self, folder: Path, pm2: Pm2) -> None:
        requires.module("torch")
        requires.tool("git")
        self.pm2, self.here, self.state = pm2, folder / "clone", pm2.state
        shutil.copytree(IMITATION, self.here, ignore=shutil.ignore_patterns("__pycache__"))
        (self.here / ".gitignore").write_text(
            "__pycache__/\n/app.config.js\n/gradients.pt\n/bucket/\n"
        )
        (self.here / "run_miner.sh").write_text(RUN_MINER)
        pm2.file = self.here / "ecosystem.config.js"
        path = f"{Path(sys.executable).parent}:{Path(pm2.program).parent}:{os.environ['PATH']}"
        # The profile requires one GPU per rank, which no test machine has.
        pm2.env |= {
            "PATH": path,
            "PYTHONPATH": str(self.here),
            "OMP_NUM_THREADS": "1",
            "LAST_STEP": "1000000",
            "MINER_GUARD_GPU__PREFLIGHT": "false",
        }
        self.sh(
            "git init -q . && git add -A && git -c user.name=t -c "
            "user.email=t@example.org commit -qm clone"
        )

    def sh(self, commands: str) -> str:
        done = subprocess.run(
            ["bash", "-c", commands],
            cwd=self.here,
            env=self.pm2.env,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def apps(self) -> list[str]:
        text = self.pm2("jlist")
        return [str(app["name"]) for app in json.loads(text[text.index("[") :])]

    def environments(self) -> list[dict[str, str]]:
        """The environments of all processes that run in the clone."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.here) and "God Daemon" not in " ".join(
                    process.cmdline()
                ):
                    found.append(process.environ())
            except (psutil.Error, OSError):
                continue
        return found

    def printed(self, app: str) -> str:
        logs = Path(self.pm2.env["PM2_HOME"]) / "logs"
        return "".join(
            path.read_text() for path in sorted(logs.glob(f"{app.replace('_', '-')}*.log"))
        )


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_from_run_miner_to_the_guard_and_back(pm2: Pm2, tmp_path: Path) -> None:
    clone = Clone(tmp_path, pm2)
    clone.sh("bash run_miner.sh")
    until(lambda: "Successfully pushed" in clone.printed(UPSTREAMS), 90, "an unguarded push")

    clone.sh(_commands("miner-guard init"))
    assert clone.apps() == ["sn38"]
    until(lambda: "UPLOAD BLOCKED" in clone.printed("sn38"), 90, "the gate's word")
    until(lambda: status_of(clone.state).get("steps", {}).get("inner_step"), 90, "guarded steps")
    pm2(
        "start",
        str(requires.REPO / "ops" / "sn38" / "auto_update.sh"),
        "--name",
        "sn38-update",
        "--interpreter",
        "bash",
    )
    pm2("save")

    before = clone.printed(UPSTREAMS)
    clone.sh(_commands("run_miner.sh …"))
    assert clone.apps() == [UPSTREAMS]
    until(
        lambda: "Successfully pushed" in clone.printed(UPSTREAMS)[len(before) :],
        90,
        "an unguarded push again",
    )
    running = clone.environments()
    assert len(running) >= 2, "launcher and rank"
    assert [name for env in running for name in env if name.startswith("_MINER_GUARD")] == []
    assert [env for env in running if "attach/site" in env.get("PYTHONPATH", "")] == []
    assert [
        words for words in pm2.left() if re.search("/bin/miner-guard |-m miner_guard", words)
    ] == []
    assert "sn38" not in (Path(pm2.env["PM2_HOME"]) / "dump.pm2").read_text(), (
        "nor comes back after a reboot"
    )
    assert clone.sh("git status --porcelain") == ""
    pm2("delete", UPSTREAMS)
