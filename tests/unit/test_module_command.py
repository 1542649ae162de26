"""A helper runs our code and never a file from the miner's directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from miner_guard.system import probe
from miner_guard.system.children import module_command
from tests.faults.guarded import REPO


def test_a_module_of_the_miners_directory_does_not_replace_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miner's `json.py` once kept the GPU sampler and the HTTP port from ever starting."""
    for name in ("json", "socket", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('foreign')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    answer = probe.ask("miner_guard.checks.host", {}, 60)
    assert "foreign" not in str(answer.reason)


def test_arguments_and_the_name_arrive_as_with_python_m(tmp_path: Path) -> None:
    (tmp_path / "helper_of_test.py").write_text("import sys; print(__name__, *sys.argv)\n")
    done = subprocess.run(
        [*module_command("helper_of_test"), "-x", "y"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["__main__", str(tmp_path / "helper_of_test.py"), "-x", "y"]
