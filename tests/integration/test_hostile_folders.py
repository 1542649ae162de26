"""Folders beside the miner's script, and PyPI's `validators`, never stand in for the guard's own
packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support import distribution, requires

pytestmark = pytest.mark.slow

MINER = """
import sys
import miner_guard
guard = miner_guard.init()
for step in range(1, 6):
    guard.step(outer_step=1, inner_step=step, loss=3.0, lr=1e-4)
print("GATE", bool(guard.may_upload(outer_step=1, inner_step=5, kind="gradient")), flush=True)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requires.tool("git")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1767323045")
        return distribution.build(requires.REPO, tmp_path_factory.mktemp("dist"))[1]


def site(folder: Path, wheel: Path, theirs: str) -> Path:
    """The wheel in a folder of its own, and PyPI's `validators` before, after or not at all."""
    target = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]

    def ours() -> None:
        subprocess.run([*install, "--target", str(target), str(wheel)], check=True, timeout=120)

    if theirs != "before":
        ours()
    if theirs:
        (target / "validators").mkdir(parents=True)
        (target / "validators" / "__init__.py").write_text("def email(value): return True\n")
    if theirs == "before":
        ours()
    return target


@pytest.mark.parametrize("theirs", ["", "before", "after"])
@pytest.mark.parametrize("packages", [False, True], ids=["folders", "packages"])
@pytest.mark.parametrize("path", ["", "."], ids=["", "PYTHONPATH=."])
def test_steps_gate_and_exit_code_are_those_of_the_run(
    wheel: Path, tmp_path: Path, theirs: str, packages: bool, path: str
) -> None:
    for name in ("uploads", "validators"):
        (tmp_path / name).mkdir()
        if packages:
            (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text(MINER)
    paths = [path] if path else []
    paths += [str(site(tmp_path / "installed", wheel, theirs)), sysconfig.get_path("purelib")]
    state = tmp_path / "state"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MINER_GUARD"))}
    guard = [sys.executable, "-S", "-m", "miner_guard"]
    run = ["run", "--no-preflight", "--no-restart", "--state-dir", str(state), "--"]
    done = subprocess.run(
        [*guard, *run, sys.executable, "-S", "train.py"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    records = [json.loads(line) for line in (state / "guard.jsonl").read_text().splitlines()]
    steps = [r["inner_step"] for r in records if r["event"] == "inner_step"]
    exits = [r["code"] for r in records if r["event"] == "miner_exited"]
    assert steps == [1, 2, 3, 4, 5], done.stdout + done.stderr
    assert "GATE False" in done.stdout, "inner step 5 is below the minimum of 50"
    assert exits == [3], "the miner's own code"
    assert done.returncode == 3, done.stdout
