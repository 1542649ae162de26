"""Installing the guard as a stranger does: from the sdist, on each Python, next to PyPI's
`validators`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard import __version__
from tests.support import distribution, requires

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1767323045")
        return distribution.build(requires.REPO, tmp_path_factory.mktemp("dist"))[0]


def interpreter(version: str) -> str:
    """A Python of this version, from the PATH or from pyenv."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    # Check these before the PATH: pyenv's shims exist even for a Python that is not selected.
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else requires.tool(f"python{version}")


def clean(**more: str) -> dict[str, str]:
    """An environment without this source tree or any other guard."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MINER_GUARD"))}
    return {**kept, **more}


def run(*command: str | Path, cwd: Path, seconds: float = 400) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=clean(), capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def venv(folder: Path, version: str) -> Path:
    """A new environment's Python."""
    run(interpreter(version), "-m", "venv", folder / "venv", cwd=folder)
    return folder / "venv" / "bin" / "python"


@pytest.mark.parametrize("version", PYTHONS)
def test_the_sdist_alone_gives_a_guard_that_runs(sdist: Path, tmp_path: Path, version: str) -> None:
    python = venv(tmp_path, version)
    run(python, "-m", "pip", "install", "--quiet", sdist, cwd=tmp_path)
    guard = python.with_name("miner-guard")
    assert run(guard, "--version", cwd=tmp_path) == f"miner-guard {__version__}\n"
    here = ["--no-preflight", "--finite", "--state-dir", tmp_path / "state"]
    assert "GUARD STOPPED: exit code 0" in run(guard, "run", *here, "--", "true", cwd=tmp_path)
    run(python, "-c", "import miner_guard.uploads.gate", cwd=tmp_path)
    run(guard, "init", "--ops", "mine", cwd=tmp_path)
