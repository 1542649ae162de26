"""If the guard is killed in the middle of something, a tiny shell finishes the stop in its place.

It waits for the end of a pipe that only the guard holds open. It is `sh`, not Python, because the
miner's own updater runs `pkill -9 python`, and because it costs 1 MB.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping

from miner_guard.state_dir import MARKER
from miner_guard.system.processes import HELPER

_SCRIPT = r"""
read -r word <&0 && exit 0
left() { grep -lzxF "$1" /proc/[0-9]*/environ 2>/dev/null | sed 's,/proc/\([0-9]*\)/environ,\1,'; }
end() { for pid in $(left "$2"); do kill -"$1" "$pid" 2>/dev/null; done; }
waited=0
while [ "$waited" -lt "$2" ] && [ -n "$(left "$1")" ]; do sleep 1; waited=$((waited + 1)); done
end TERM "$1"; sleep 2
for round in 1 2 3; do end KILL "$1"; sleep 0.2; done
"""
"""$1 the marker of the run, $2 seconds to stop. A word before the end of the pipe means: not
needed."""


class Deathwatch:
    """The shell that outlives the guard. Making one raises OSError where there is no /bin/sh."""

    def __init__(self, run_id: str, grace_s: float, env: Mapping[str, str]) -> None:
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        try:
            self._popen = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    _SCRIPT,
                    "miner-guard-reaper",
                    f"{MARKER}={run_id}",
                    str(int(grace_s) + 1),
                ],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={"PATH": env.get("PATH", "/usr/bin:/bin"), HELPER: "reaper"},
            )
        finally:
            os.close(reading)

    def dismiss(self) -> None:
        """The guard ends in order; nothing is left to do."""
        with contextlib.suppress(OSError):
            os.write(self._writing, b"done\n")
        os.close(self._writing)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=2.0)
