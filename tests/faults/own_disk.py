"""A file system for one state directory, which a test can fill and freeze."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class OwnDisk:
    """An ext4 file system in a file. Raises OSError with the reason if none can be mounted."""

    def __init__(self, folder: Path, megabytes: int = 32) -> None:
        self.place = folder / "disk"
        self.frozen = False
        self._image = folder / "image"
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(megabytes * 1024 * 1024)
        mount = ["mount", "-o", "loop", str(self._image), str(self.place)]
        for command in (["mkfs.ext4", "-q", str(self._image)], mount, ["fsfreeze", "-h"]):
            if shutil.which(command[0]) is None:
                raise OSError(f"{command[0]} is not installed")
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise OSError(f"no file system can be mounted here: {done.stderr.strip()}")

    def freeze(self) -> None:
        """Freeze the disk: from now on every writer blocks in the kernel, where not even SIGKILL
        ends it."""
        subprocess.run(["fsfreeze", "-f", str(self.place)], check=True)
        self.frozen = True

    def thaw(self) -> None:
        """Let the writers continue; a no-op if the disk is not frozen."""
        if self.frozen:
            self.frozen = False
            subprocess.run(["fsfreeze", "-u", str(self.place)], check=True)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk."""
        ballast = self.place / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65536)
        try:
            yield
        finally:
            ballast.unlink()

    def close(self) -> None:
        """Thaw, unmount and remove the disk."""
        self.thaw()
        subprocess.run(["umount", "-l", str(self.place)], check=True)
        self._image.unlink()
