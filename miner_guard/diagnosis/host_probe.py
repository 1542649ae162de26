"""The node's facts, in a child, since a dead network file system must hang nobody.

Run as `python -m miner_guard.diagnosis.host_probe`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from miner_guard import probe

_CGROUP_MEMORY = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_LAST_XIDS = 5


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes in bytes, limits as the kernel gives them (-1: unlimited); null where not readable."""
    disks = {path: _free(path) for path in request["paths"]}
    return {
        "shm_bytes": _size("/dev/shm"),
        "limits": {
            "nofile": _limit(resource.RLIMIT_NOFILE),
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
            "nproc": _limit(resource.RLIMIT_NPROC),
        },
        "disks": disks,
        "disk_bytes": max((size for p in request["paths"] if (size := _size(p)) is not None), default=None),
        "ports": [_port(entry["port"], entry["use"]) for entry in request["ports"]],
        "nvidia_devices": {p: os.access(p, os.R_OK | os.W_OK) for p in sorted(glob.glob("/dev/nvidia[0-9]*"))},
        "kernel_xids": _kernel_xids(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory(),
    }


def _existing(path: str) -> Path:
    there = Path(path).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there


def _free(path: str) -> int | None:
    try:
        stats = os.statvfs(_existing(path))
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize


def _size(path: str) -> int | None:
    try:
        stats = os.statvfs(_existing(path))
    except OSError:
        return None
    return stats.f_blocks * stats.f_frsize


def _limit(which: int) -> int:
    soft, _hard = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _memory() -> int:
    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_MEMORY:
        with contextlib.suppress(OSError, ValueError):
            return min(total, int(path.read_text()))
    return total


def _port(number: int, use: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"port": number, "use": use, "free": True, "held_by": None, "error": None}
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        # As servers do: a port whose last connection still lingers counts as free.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("", number))
        except OSError as error:
            taken = error.errno == 98
            entry |= {"free": False if taken else None, "error": error.strerror, "held_by": _holder(number)}
    return entry


def _holder(number: int) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == number:
                process = psutil.Process(connection.pid)
                return f"pid {process.pid} ({process.name()})"
    return None


def _kernel_xids() -> list[str] | None:
    """The last Xid lines of the kernel's ring buffer; None where this user may not read it."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while record := os.read(fd, 8192):
            text = record.decode("utf-8", "replace").partition(";")[2].splitlines()[0]
            if re.search(r"NVRM: Xid", text):
                lines.append(text)
    except BlockingIOError:
        pass
    except OSError:
        return lines[-_LAST_XIDS:] or None
    finally:
        os.close(fd)
    return lines[-_LAST_XIDS:]


if __name__ == "__main__":
    probe.reply(facts(probe.request()))
