"""The manifest that seals a checkpoint's folder: which files belong to it, with their sizes and
checksums."""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path

MANIFEST = "manifest.json"


def seal(draft: Path, step: int) -> int:
    """Flush the files of a finished draft to disk and list them in its manifest. Returns their
    total size in bytes. Raises OSError."""
    files = {}
    for file in sorted(p for p in draft.rglob("*") if p.is_file()):
        fsync(file)
        files[str(file.relative_to(draft))] = {
            "size_bytes": file.stat().st_size,
            "crc32": _crc32(file),
        }
    (draft / MANIFEST).write_text(
        json.dumps({"step": step, "written": time.time(), "files": files})
    )
    fsync(draft / MANIFEST)
    fsync(draft)
    return sum(f["size_bytes"] for f in files.values())


def damage(path: Path) -> str | None:
    """Return the first mismatch between a checkpoint's files and its manifest; None if all files
    are intact."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return (
            f"its manifest cannot be read ({error}); either the checkpoint is unfinished, or "
            "miner-guard did not write it"
        )
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["size_bytes"]:
            return f"{name} has {file.stat().st_size} bytes, but {facts['size_bytes']} were written"
        if _crc32(file) != facts["crc32"]:
            return f"{name} does not match its checksum"
    return None


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(1024 * 1024):
            value = zlib.crc32(chunk, value)
    return value
