"""A publisher that is killed after a server's k-th request, for tests that try every k."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from miner_guard.config import RepoSettings
from miner_guard.uploads.journal import PublishInProgress, exclusively, journal_path
from miner_guard.uploads.publisher import Revision
from tests.support.forks import Forks, forks


class Requests(list[str]):
    """The requests that a server received, numbered from one. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._mutex = threading.Lock()

    def note(self, request: str) -> int:
        """Add a request; returns its number."""
        with self._mutex:
            self.append(request)
            return len(self)


class Watched(Protocol):
    """A server that reports each request after it has handled it, before it responds."""

    after: Callable[[int], None]
    requests: Requests


def push_request(settings: RepoSettings, what: Revision, folder: Path) -> str:
    """The request that `python -m miner_guard.uploads.push` reads from its stdin."""
    return json.dumps(
        {
            "repo": asdict(settings),
            "journal_folder": str(folder),
            "deadline_s": 60.0,
            "revision": {**asdict(what), "folder": str(what.folder)},
        }
    )


_PUSH = """
import importlib, os, sys
from miner_guard.uploads import push
importlib.import_module(sys.argv[1])
def work():
    sys.stdin = open(sys.argv[2])
    try:
        push.main()
    except SystemExit as end:
        os._exit(end.code)
"""


class Publishers:
    """Publishers of one repo, each a fork of a process that has imported the repo's library."""

    def __init__(self, forks: Forks, request: Path, settings: RepoSettings) -> None:
        self._forks, self._request, self._settings = forks, request, settings

    def push_and_kill(self, server: Watched, what: Revision, number: int) -> bool:
        """Push, and SIGKILL the publisher at its request `number`. Returns True if it finished
        before that."""
        first = len(server.requests)

        def kill(count: int) -> None:
            if count - first == number:
                self._forks.signal_kill()

        self._request.write_text(push_request(self._settings, what, self._request.parent))
        server.after = kill
        self._forks.start()
        code = self._forks.wait()
        server.after = _nothing
        return code == 0


@contextlib.contextmanager
def publishers(
    settings: RepoSettings, library: str, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[Publishers]:
    """Publishers whose journal is in `folder`; `library` is what the repo's client imports."""
    request = folder / "push-request.json"
    with forks(_PUSH, library, request, env=env) as started:
        yield Publishers(started, request, settings)


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
