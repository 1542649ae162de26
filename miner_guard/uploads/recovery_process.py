"""Finishes an upload whose publisher died while making the new revision visible: `python -m
uploads.recovery_process`.

It waits for EOF on its stdin, which the publisher holds open; the journal then shows whether any
work remains. It inherits the publisher's lock, so no other publisher can start in between.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from miner_guard.config import RepoSettings
from miner_guard.system.children import own_module
from miner_guard.uploads.journal import COMMITTING, Journal
from miner_guard.uploads.publisher import Publisher, Retry
from miner_guard.uploads.repos import open_repo

_DEADLINE_S = 120.0


def start(settings: dict[str, object], journal: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start this process's recovery process. Its stdin stays open as long as this process lives."""
    child = subprocess.Popen(
        own_module("miner_guard.uploads.recovery_process"),
        stdin=subprocess.PIPE,
        # Not the publisher's stdout: its caller reads that to EOF and would wait for this process.
        stdout=subprocess.DEVNULL,
        pass_fds=(lock,),
        # New session: a signal that kills the publisher's process group must not kill its
        # recovery process.
        start_new_session=True,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps({"repo": settings, "journal": str(journal)}).encode() + b"\n")
    child.stdin.flush()
    return child


def main() -> None:
    """Wait until the publisher exits, then finish its work."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    request = json.loads(sys.stdin.readline())
    sys.stdin.read()
    journal = Journal(Path(request["journal"]))
    left = journal.read()
    if left is None or left["phase"] != COMMITTING:
        return
    repo = open_repo(RepoSettings(**request["repo"]))
    line = Publisher(repo, journal, _say, Retry(deadline_s=_DEADLINE_S)).recover()
    if line is not None:
        _say(line)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
