"""Reads the node's facts in a child process, so that a dead network file system cannot hang the
guard.

Run as `python -m miner_guard.checks.host_probe`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from miner_guard.checks.samplers import existing, read_cgroup_memory
from miner_guard.system import probe

_LAST_XIDS = 5


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes in bytes and limits as the kernel reports them (-1: unlimited). Unreadable
    values are null."""
    return {
        "shm_bytes": _disk("/dev/shm", "total"),
        "limits": {
            "nofile": _limit(resource.RLIMIT_NOFILE),
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
        },
        "disks": {path: _disk(path, "free") for path in request["paths"]},
        "disk_bytes": max(
            filter(None, (_disk(path, "total") for path in request["paths"])), default=None
        ),
        "ports": [_port(entry["port"], entry["use"]) for entry in request["ports"]],
        "kernel_xids": _kernel_xids(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory(),
    }


def _disk(path: str, what: str) -> int | None:
    """`free` or `total` bytes of the file system that holds the path, or would hold it."""
    with contextlib.suppress(OSError):
        return int(getattr(psutil.disk_usage(str(existing(Path(path).absolute()))), what))
    return None


def _limit(which: int) -> int:
    soft, _hard = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _memory() -> int:
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(total, read_cgroup_memory()[0] or total)
    return total


def _port(number: int, use: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "port": number,
        "use": use,
        "free": True,
        "held_by": None,
        "error": None,
    }
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        # Set the option that servers set, so that a port whose last connection is in TIME_WAIT
        # counts as free.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("", number))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            entry |= {
                "free": False if taken else None,
                "error": error.strerror,
                "held_by": _holder(number),
            }
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
    """The last Xid lines of the kernel's ring buffer; None if this user lacks permission."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while record := os.read(fd, 8192):
            text = record.decode("utf-8", "replace").partition(";")[2].splitlines()[0]
            if "NVRM: Xid" in text:
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
