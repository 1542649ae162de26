"""sdist and wheel of a source tree, the same bytes for the same source: `python -m
tests.support.distribution TREE OUT`, with SOURCE_DATE_EPOCH in the environment.

setuptools writes reproducible wheels, but gives the sdist the original times and owners of the
files.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

_BUILD = """
import os, sys
os.umask(0o022)
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The sdist, built from what git tracks in `tree`, and the wheel, built from that sdist."""
    source = out / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        # The repository shows two folders of the package at its top as links; setuptools follows
        # no link, and the package has the files already.
        if (tree / name).is_symlink():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / name, source / name)
    sdist = _run("build_sdist", source, out)
    _normalise(sdist, int(os.environ["SOURCE_DATE_EPOCH"]))
    shutil.rmtree(source)
    unpacked = out / "unpacked"
    shutil.unpack_archive(sdist, unpacked)
    (root,) = unpacked.iterdir()
    wheel = _run("build_wheel", root, out)
    shutil.rmtree(unpacked)
    return sdist, wheel


def _run(step: str, source: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, step, str(out.resolve())],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return out / done.stdout.splitlines()[-1]


def _normalise(sdist: Path, epoch: int) -> None:
    """Sort the entries, and give them all the same time and no owner."""
    packed = io.BytesIO()
    with (
        tarfile.open(sdist) as old,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as whole:
        whole.write(packed.getvalue())


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in build(Path(sys.argv[1]), Path(sys.argv[2])))
