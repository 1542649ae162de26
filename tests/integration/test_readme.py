"""The README's commands and code work as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import requires

README = (requires.REPO / "README.md").read_text(encoding="utf-8")
SHELL = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A newcomer's starting point: an empty folder with the README's train.py."""
    place = tmp_path_factory.mktemp("readme")
    (place / "train.py").write_text(next(code for code in PYTHON if "miner_guard.init()" in code))
    return place


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "MINER_GUARD_STATE_DIR": str(folder / "state")}


def test_every_shell_command_runs_in_the_order_of_the_text(folder: Path) -> None:
    requires.tool("jq")
    for block in SHELL:
        if "miner-guard run" in block:
            # The settings that `init` wrote above are for subnet 38's miner, not for this one.
            (folder / "guard.toml").unlink(missing_ok=True)
        for command in filter(None, map(str.strip, block.splitlines())):
            answer = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=folder,
                env=_environment(folder),
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert answer.returncode == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
            assert answer.stdout.strip(), f"{command} said nothing"


def test_the_python_examples_run(folder: Path, tmp_path: Path) -> None:
    for code in PYTHON:
        answer = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "status" / "monitoring_costs.json").is_file()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_are_targets_of_make(target: str) -> None:
    assert f"    make {target} " in README
    answer = subprocess.run(
        [requires.tool("make"), "-n", target],
        cwd=requires.REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr


def test_the_table_lists_exactly_the_commands_of_the_program() -> None:
    from miner_guard.cli.main import COMMANDS

    table = README.partition("## Commands")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:miner-guard )?([a-z]+(?:-[a-z]+)*)\b[^`]*`", table)) & (
        set(COMMANDS) | {"nothing"}
    )
    assert named == set(COMMANDS)
