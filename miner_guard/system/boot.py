"""Which boot of which machine this is."""

from __future__ import annotations

from pathlib import Path


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str | None:
    """What tells two machines of one name apart, as containers' often are; None where nothing
    does."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
