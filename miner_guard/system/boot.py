"""Identifies the current boot of this machine."""

from __future__ import annotations

from pathlib import Path


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str | None:
    """Return the kernel's id for the current boot, or None if it is unreadable. The id
    distinguishes machines that have the same host name, as containers often do."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
