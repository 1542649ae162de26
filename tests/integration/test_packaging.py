"""sdist and wheel: they contain what they should, their builds are reproducible, and the wheel
alone is enough."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from miner_guard import __version__
from miner_guard.config import read_toml
from tests.support import distribution, requires

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    requires.tool("git")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1767323045")
        return Built(*distribution.build(requires.REPO, tmp_path_factory.mktemp("dist")))


def tracked(*folders: str) -> set[str]:
    requires.tool("git")
    listed = ["git", "ls-files", *folders]
    answer = subprocess.run(listed, cwd=requires.REPO, capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


@pytest.fixture
def in_tokyo() -> Iterator[None]:
    """Set the time zone, which affects the whole process, including later tests in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
def test_a_second_build_elsewhere_has_the_same_bytes(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767323045")
    again = Built(*distribution.build(requires.REPO, tmp_path))
    assert again.wheel.read_bytes() == built.wheel.read_bytes()
    assert again.sdist.read_bytes() == built.sdist.read_bytes()


def test_the_sdist_is_the_whole_source(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        name
        for name in tracked()
        if not name.startswith(".") and not (requires.REPO / name).is_symlink()
    }
    assert expected - names == set()


def test_the_wheel_holds_the_packages_and_ops_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    assert built.wheel.name.endswith("-py3-none-any.whl"), "no compiler is needed"
    packages = tracked("miner_guard", "monitoring_cost_tracker.py")
    data = f"miner_guard-{__version__}.data/data/share/miner-guard/"
    assert packages - names == set()
    assert {name for name in names if "/ops/" in name} == {data + name for name in tracked("ops")}
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "miner_guard",
        "monitoring_cost_tracker.py",
    }


def test_the_metadata_is_ready_for_an_index(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        text = archive.read(f"miner_guard-{__version__}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    assert not [c for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    assert metadata.get_all("Project-URL") is None, "the project has no public home yet"
    needs = [need for need in metadata.get_all("Requires-Dist") or () if "numpy" in need]
    assert all('extra == "torch"' in need for need in needs), "only a miner's torch needs numpy"


def test_ci_runs_every_python_that_the_metadata_promises() -> None:
    project = read_toml(requires.REPO / "pyproject.toml")["project"]
    promised = {c.rpartition(" ")[2] for c in project["classifiers"] if " :: 3." in c}
    for workflow in ("ci", "release"):
        text = (requires.REPO / ".github" / "workflows" / f"{workflow}.yml").read_text()
        (matrix,) = re.findall(r"python: (\[.*\])", text)
        assert set(json.loads(matrix)) == promised


@pytest.mark.parametrize("way", ["venv", "target"])
def test_the_installed_wheel_writes_the_files_of_ops(
    built: Built, tmp_path: Path, way: str
) -> None:
    """Without a source tree, only the files that pip installed exist."""
    python, env = _installed(built.wheel, tmp_path, way)

    def ops(folder: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "miner_guard", "init", "--ops", folder],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )

    done = ops("mine")
    assert done.returncode == 0, done.stderr
    written = {str(p.relative_to(tmp_path)) for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    assert written == {name.replace("ops/", "mine/", 1) for name in tracked("ops")}
    again = ops("mine")
    assert (again.returncode, "is not an empty folder" in again.stderr) == (64, True)
    (share,) = tmp_path.rglob("share/miner-guard")
    shutil.rmtree(share)
    without = ops("other")
    assert (without.returncode, "has no ops/ files" in without.stderr) == (69, True)


def _installed(wheel: Path, folder: Path, way: str) -> tuple[str, dict[str, str]]:
    """The wheel in a separate directory; its dependencies come from the tests' environment."""
    pip = [sys.executable, "-m", "pip"]
    install = ["install", "--quiet", "--no-deps", "--no-index"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if way == "target":
        subprocess.run([*pip, *install, "--target", str(folder / "site"), str(wheel)], check=True)
        return sys.executable, {**env, "PYTHONPATH": str(folder / "site")}
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
    )
    python = str(folder / "venv" / "bin" / "python")
    subprocess.run([*pip, "--python", python, *install, str(wheel)], check=True, timeout=120)
    (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python, env
