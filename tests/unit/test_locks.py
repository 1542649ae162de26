"""What continuous integration and the container install: no file whose hash is not in locks/."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from miner_guard.config import read_toml
from tests.support import requires

LOCKS = sorted((requires.REPO / "locks").glob("*.txt"))
HASHED = re.compile(r"[\w.-]+==\S+(?: ; .+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")


def test_every_package_has_hashes_and_what_the_project_names_is_there() -> None:
    names = set()
    for lock in LOCKS:
        assert re.fullmatch(rf"(?:{HASHED.pattern})+", lock.read_text()), lock
        names |= set(re.findall(r"^([\w.-]+)==", lock.read_text(), re.MULTILINE))
    project = read_toml(requires.REPO / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["dev"], *extras["demo"], *extras["torch"]]
    assert {Requirement(need).name.lower() for need in needed} - {"miner-guard"} <= names
    pins = (requires.REPO / "constraints.txt").read_text()
    torch = re.search(r"^torch==.+$", pins, re.MULTILINE)
    assert torch is not None
    assert torch[0] in (requires.REPO / "locks" / "torch.txt").read_text()


def test_nothing_is_installed_without_them() -> None:
    for path in ("ops/Dockerfile", ".ci/install", ".github/workflows/release.yml"):
        text = (requires.REPO / path).read_text()
        commands = re.findall(r"(?:^|[ ;/])pip(?: install)? .*--no-deps.*", text)
        hashed = [command for command in commands if "--require-hashes" in command]
        assert hashed, path
        # Only this project itself comes without a hash, and then without its dependencies.
        assert [c for c in commands if c not in hashed and not c.endswith(" .")] == [], path
    assert "LOCKED:" in (requires.REPO / ".github" / "workflows" / "ci.yml").read_text()


def test_a_replaced_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "prey-1-py3-none-any.whl"

    def publish(code: str) -> str:
        about = "Metadata-Version: 2.1\nName: prey\nVersion: 1\n"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("prey.py", code)
            archive.writestr("prey-1.dist-info/METADATA", about)
            archive.writestr("prey-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr("prey-1.dist-info/RECORD", "")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def install(lock: str) -> str:
        (tmp_path / "lock.txt").write_text(lock)
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--upgrade"]
        where = ["--find-links", str(tmp_path), "--target", str(tmp_path / "site")]
        subprocess.run([*command, *where, "-r", str(tmp_path / "lock.txt")], capture_output=True)
        return (tmp_path / "site" / "prey.py").read_text()

    lock = f"prey==1 --hash=sha256:{publish('good')}\n"
    assert install(lock) == "good"
    publish("evil")
    assert install(lock) == "good"
    assert install("prey==1\n") == "evil", "the attack works"
