"""A publisher that is killed when a server has done its k-th request, for walks through all of
them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from miner_guard.config import RepoSettings
from uploads.journal import PublishInProgress, exclusively, journal_path
from uploads.publisher import Revision


class Requests(list[str]):
    """What a server was asked, numbered from one. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._mutex = threading.Lock()

    def note(self, request: str) -> int:
        """Add one; returns its number."""
        with self._mutex:
            self.append(request)
            return len(self)


class Watched(Protocol):
    """A server that tells of each request when it has done it and has not answered yet."""

    after: Callable[[int], None]
    requests: Requests


def push_request(settings: RepoSettings, what: Revision, folder: Path) -> str:
    """What `python -m uploads.push` reads from its stdin."""
    return json.dumps(
        {
            "repo": asdict(settings),
            "journal_folder": str(folder),
            "deadline_s": 60.0,
            "revision": {**asdict(what), "folder": str(what.folder)},
        }
    )


def push_and_kill(
    settings: RepoSettings,
    server: Watched,
    what: Revision,
    folder: Path,
    number: int,
    env: Mapping[str, str] | None = None,
) -> bool:
    """Push, and SIGKILL the publisher at its request `number`. True where it came to its end before
    that."""
    first = len(server.requests)
    with subprocess.Popen(
        [sys.executable, "-m", "uploads.push"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(env or {})},
    ) as child:

        def kill(count: int) -> None:
            if count - first == number:
                child.send_signal(signal.SIGKILL)
                child.wait()

        server.after = kill
        child.communicate(push_request(settings, what, folder), timeout=60)
        server.after = _nothing
    return child.returncode == 0


def _nothing(_number: int) -> Any:
    return None


def wait_for_the_recovery(label: str, folder: Path) -> None:
    """Wait until no process holds the journal of the repo `label`. Raises TimeoutError."""
    path = journal_path(folder, label)
    for _ in range(600):
        with contextlib.suppress(PublishInProgress), exclusively(path):
            return
        time.sleep(0.05)
    raise TimeoutError("the recovery process did not end")
