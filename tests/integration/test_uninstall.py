"""`init --remove` after a run under pm2: only what existed before `init` is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import requires
from tests.support.present_state import status_of
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TRAIN = """
import time
import miner_guard

guard = miner_guard.init()
for step in range(1, 10**6):
    time.sleep(0.05)
    guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-4)
"""
GUARD = Path(sys.executable).with_name("miner-guard")


class Account:
    """A user's home with a miner in it, and the commands that this user runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.miner = root, root / "home" / "miner"
        self.miner.mkdir(parents=True)
        (root / "tmp").mkdir()
        (self.miner / "train.py").write_text(TRAIN)
        (self.miner / ".env").write_text("WANDB_MODE=offline\n")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "MINER_GUARD"))}
        self.env = {
            **kept,
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "PM2_HOME": str(root / "pm2"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def __call__(self, *command: str | Path) -> str:
        done = subprocess.run(
            command, env=self.env, cwd=self.miner, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def files(self) -> dict[str, str]:
        """Text of each file by path, including the guard's shared memory but not pm2's files; empty
        for folders."""
        places = [self.root / "home", self.root / "tmp", Path("/dev/shm")]
        return {
            str(path): path.read_text(errors="replace") if path.is_file() else ""
            for place in places
            for path in place.rglob("*")
            if place != Path("/dev/shm") or "miner-guard" in path.name
        }


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    account = Account(tmp_path)
    yield account
    subprocess.run([requires.tool("pm2"), "kill"], env=account.env, capture_output=True)


@pytest.fixture
def steps(account: Account) -> Callable[[], int]:
    """The number of the miner's last step."""

    def count() -> int:
        status = account.root / "home" / ".local" / "state" / "miner-guard" / "miner"
        document = status_of(status)
        return int((document.get("steps") or {}).get("inner_step") or 0)

    return count


def test_only_what_existed_before_init_is_left(account: Account, steps: Callable[[], int]) -> None:
    pm2 = requires.tool("pm2")
    before = account.files()
    account(GUARD, "init", "--", sys.executable, "train.py")
    account(pm2, "start", "ecosystem.config.js")
    until(lambda: steps() > 5, 60, lambda: account(pm2, "logs", "miner", "--nostream"))
    account(GUARD, "ctl", "checkpoint")
    account(GUARD, "report", "-o", account.root / "report.html")
    refused = subprocess.run([GUARD, "init", "--remove"], env=account.env, cwd=account.miner)
    assert refused.returncode == 1, "a guard runs"
    assert steps() > 5
    account(pm2, "delete", "miner")
    answer = account(GUARD, "init", "--remove")
    assert account.files() == before
    assert "pm2 delete miner; pm2 save; rm ~/.pm2/logs/miner.log*" in answer
    assert json.loads(account(pm2, "jlist").splitlines()[-1]) == []
