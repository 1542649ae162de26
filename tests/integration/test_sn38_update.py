"""ops/sn38/auto_update.sh: it pulls a newer version and asks the guard for a restart, and touches
nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import requires

SCRIPT = requires.REPO / "ops" / "sn38" / "auto_update.sh"


class Clone:
    """A miner's clone, its origin, and the commands that were called."""

    def __init__(self, folder: Path) -> None:
        requires.tool("git")
        self.origin, self.here, self.called = folder / "origin", folder / "clone", folder / "called"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("pip", "miner-guard"):
            program = self.bin / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.called}\n')
            program.chmod(0o755)
        (self.origin / "distributed_training").mkdir(parents=True)
        self.git(self.origin, "init", "-q", "-b", "main")
        self.release("1.2.7")
        self.git(folder, "clone", "-q", str(self.origin), str(self.here))

    def git(self, where: Path, *arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=where, check=True, capture_output=True)

    def release(self, version: str) -> None:
        (self.origin / "distributed_training" / "__init__.py").write_text(
            f'__version__ = "{version}"\n'
        )
        self.git(self.origin, "add", "-A")
        self.git(self.origin, "commit", "-q", "-m", version)

    def look(self) -> tuple[str, list[str]]:
        env = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "ONCE": "1",
            "NAME": "sn38",
        }
        done = subprocess.run(
            ["bash", str(SCRIPT)],
            cwd=self.here,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout, self.called.read_text().splitlines() if self.called.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_the_current_version_is_left_alone(clone: Clone) -> None:
    printed, called = clone.look()
    assert "1.2.7 is current" in printed
    assert called == []


def test_a_newer_version_is_pulled_and_the_guard_asked_to_restart(clone: Clone) -> None:
    clone.release("1.2.10")
    printed, called = clone.look()
    assert "1.2.7 -> 1.2.10" in printed
    assert called == ["pip install --quiet -e .", "miner-guard ctl restart --name sn38"]
    assert clone.look()[1] == called, "once"


def test_an_update_that_cannot_be_installed_changes_nothing_and_is_tried_again(
    clone: Clone,
) -> None:
    """Otherwise the miner would restart into code with missing dependencies, and the version that
    was running would be gone."""
    clone.release("1.2.10")
    pip = clone.bin / "pip"
    works = pip.read_text()
    pip.write_text(f"{works}exit 1\n")
    printed, called = clone.look()
    assert (
        "pip install of 1.2.10 failed; the clone is back at 1.2.7, the miner was not restarted"
        in printed
    )
    assert called == ["pip install --quiet -e ."]
    assert "1.2.7" in (clone.here / "distributed_training" / "__init__.py").read_text()
    pip.write_text(works)
    printed, called = clone.look()
    assert "1.2.7 -> 1.2.10" in printed
    assert called[-1] == "miner-guard ctl restart --name sn38"


def test_a_clone_with_local_commits_is_not_touched(clone: Clone) -> None:
    (clone.here / "mine").write_text("x")
    clone.git(clone.here, "add", "-A")
    clone.git(clone.here, "commit", "-q", "-m", "mine")
    clone.release("1.3.0")
    printed, called = clone.look()
    assert "local changes" in printed
    assert called == []


def test_an_unreachable_origin_is_retried_later(clone: Clone) -> None:
    clone.origin.rename(clone.origin.with_name("gone"))
    printed, called = clone.look()
    assert "could not be reached" in printed
    assert called == []
