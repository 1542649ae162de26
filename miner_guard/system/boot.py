"""Identifies the current boot of this machine."""

from __future__ import annotations

from pathlib import Path


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str | None:
    """Distinguishes machines with the same name, as containers often have; None if unavailable."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
