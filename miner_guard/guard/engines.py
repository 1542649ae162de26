"""What runs the guard and what runs the ranks: pm2 and systemd, to which the guard reports, and
launchers such as torchrun, which replace ranks without asking it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miner_guard.guard.environment import under_pm2
from miner_guard.guard.keeper_client import KeeperClient
from miner_guard.rank.layout import Identity
from miner_guard.record.events import Event, event
from miner_guard.record.status_document import StatusDocument
from miner_guard.record.words import counted, or_unknown

_SHOW_EVERY_S = 5.0
_UNIT = re.compile(r"/([^/\n]+\.service)\s*$", re.MULTILINE)
"""The unit's name at the end of a line of /proc/self/cgroup."""


class ServiceManagers:
    """Reports to pm2 and systemd, through the keeper, if they started it."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._pm2, self._systemd = keeper.hello.pm2, keeper.hello.systemd
        self._ready = False
        self._shown: dict[str, Any] = {}
        self._shown_at = float("-inf")

    def _tell(self, pm2: Any, systemd: str) -> None:
        if self._pm2 and pm2 is not None:
            self._keeper.tell("pm2", pm2)
        if self._systemd:
            self._keeper.tell("notify", systemd)

    def ready(self) -> None:
        """Report that the miner has started; once is enough."""
        if not self._ready:
            self._ready = True
            self._tell("ready", "READY=1")

    def pulse(self, status: Mapping[str, Any], now: float) -> None:
        """Send what `pm2 monit` and `systemctl status` show, if it has changed."""
        if not (self._pm2 or self._systemd) or now - self._shown_at < _SHOW_EVERY_S:
            return
        shown = monitor_values(status)
        if shown != self._shown:
            self._shown, self._shown_at = shown, now
            values = {name: {"value": value} for name, value in shown.items()}
            line = ", ".join(f"{name} {value}" for name, value in shown.items())
            self._tell({"type": "axm:monitor", "data": values}, f"STATUS={line}")

    def stopping(self) -> None:
        """Report that the guard is shutting down. pm2 has asked for it itself."""
        self._tell(None, "STOPPING=1")


def start_command(env: Mapping[str, str], argv: Sequence[str], cgroup: str, folder: str) -> str:
    """The shell command that starts this guard again.

    `argv` is the guard's command line, `cgroup` the text of /proc/self/cgroup, `folder` the working
    directory.
    """
    if under_pm2(env):
        return f"pm2 restart {shlex.quote(env.get('name') or env['pm_id'])}"
    if "NOTIFY_SOCKET" in env and (unit := _UNIT.search(cgroup)) is not None:
        user = "--user " if "/user@" in cgroup else ""
        return f"systemctl {user}restart {unit[1]}"
    program = Path(argv[0])
    words = ["python", "-m", "miner_guard"] if program.name == "__main__.py" else [program.name]
    return f"cd {shlex.quote(folder)} && {shlex.join([*words, *argv[1:]])}"


def current_start_command(env: Mapping[str, str]) -> str | None:
    """`start_command` of this process; None if its command line or folder cannot be read."""
    with contextlib.suppress(OSError, IndexError):
        cgroup = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
        return start_command(env, sys.argv, cgroup, os.getcwd())
    return None


def monitor_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, as pm2 shows them; "unknown" for a value that is not known."""
    status = StatusDocument.from_json(document)
    steps = status.steps
    outer, inner, step_s = steps.outer_step, steps.inner_step, steps.step_time_s
    return {
        "State": str(status.state),
        "Outer step": "unknown" if outer is None else outer,
        "Inner step": "unknown" if inner is None else inner,
        "Loss": or_unknown(steps.loss, ".3f"),
        "Step time": "unknown" if step_s is None else f"{step_s:.1f} s",
        "Restarts": status.restarts or 0,
        "Hang": status.hang.hang or "none",
    }


class RestartsInPlace:
    """Counts how often a launcher, such as torchrun with `--max-restarts`, has replaced its ranks
    in this run, and why: after a failure, or because nodes joined or left."""

    def __init__(self) -> None:
        self.count = 0
        self._now: dict[int, Identity] = {}
        """The ranks since the last restart."""

        self._before: set[tuple[int, int]] = set()

    def launched(self) -> None:
        """Forget the ranks of the last launch."""
        self._now.clear()

    def replaced(self, ranks: Mapping[int, Identity]) -> Iterator[Event]:
        """Yield an event if ranks have new processes since the last call and these are the first of
        a restart: the other ranks follow them."""
        new = [
            rank for rank, each in ranks.items() if _who(self._now.get(rank, each)) != _who(each)
        ]
        if new:
            self.count += 1
            yield self._restarted(new, ranks[new[0]], self._now[new[0]])
            self._before, self._now = {_who(each) for each in self._now.values()}, {}
        for rank, each in ranks.items():
            if _who(each) not in self._before:
                self._now.setdefault(rank, each)

    def _restarted(self, new: Sequence[int], now: Identity, before: Identity) -> Event:
        # Ranks that lose a peer fail too, so torchrun counts a node that leaves as a failure.
        size, was = now.world_size, before.world_size
        joined = f"; world size {was} -> {size}" if size != was else ""
        ranks, sizes = counted(len(new), "rank"), {"world_size": size, "world_size_before": was}
        text = f"RANKS RESTARTED: the launcher replaced {ranks}, restart {self.count} in place"
        facts: dict[str, Any] = {"ranks": new, "generation": now.generation, **sizes}
        level = "info" if joined else "warning"
        return event("ranks_restarted", level, f"{text}{joined}", count=self.count, **facts)


def _who(rank: Identity) -> tuple[int, int]:
    return rank.pid, rank.process_start
