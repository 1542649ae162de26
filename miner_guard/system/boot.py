"""Identifies the current boot of this machine."""

from __future__ import annotations

from pathlib import Path


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str | None:
    """The kernel's id for this boot, which distinguishes machines with the same host name
    (containers often share one). None if it is unreadable."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
