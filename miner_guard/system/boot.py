"""Identifies the current boot of this machine."""

from __future__ import annotations

from pathlib import Path


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str | None:
    """The kernel's id of this boot, which tells machines with the same host name apart (containers
    often share one). None if it is unreadable."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
