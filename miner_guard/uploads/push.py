"""Pushes one revision from a child process, so that a training rank never waits for a server or
dies with the upload.

`push` is the parent's side. The child is
`python -m miner_guard.uploads.push`: it takes a JSON request on stdin
and prints human-readable lines on stdout, the last line being one JSON result. SIGTERM cancels.
Neither the command line nor the request contains a credential.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miner_guard.config import RepoSettings
from miner_guard.record.redaction import Redactor
from miner_guard.system.children import own_module
from miner_guard.uploads.journal import Journal, PublishInProgress, exclusively, journal_path
from miner_guard.uploads.publisher import (
    Cancelled,
    Publisher,
    PublishError,
    Result,
    Retry,
    Revision,
)
from miner_guard.uploads.recovery_process import start as start_recovery
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import RepoError

_RESULT = "push result: "
_GRACE_S = 10.0


def push(
    settings: RepoSettings,
    revision: Revision,
    journal_folder: Path,
    say: Callable[[str], None],
    *,
    deadline_s: float = 600.0,
) -> Result:
    """Publish in a child and wait for it. Raises PublishError, including if the child dies or
    exceeds its deadline."""
    request = {
        "repo": dataclasses.asdict(settings),
        "journal_folder": str(journal_folder),
        "deadline_s": deadline_s,
        "revision": {**dataclasses.asdict(revision), "folder": str(revision.folder)},
    }
    child = subprocess.Popen(
        own_module("miner_guard.uploads.push"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        # The child may exit before it reads the request; the missing result reports that below.
        child.stdin.write(json.dumps(request))
        child.stdin.close()
    timer = threading.Timer(deadline_s + _GRACE_S, child.kill)
    timer.start()
    try:
        return _result(child, say, deadline_s)
    finally:
        timer.cancel()
        child.stdout.close()
        if child.poll() is None:
            child.terminate()
            child.wait()


def _result(child: subprocess.Popen[str], say: Callable[[str], None], deadline_s: float) -> Result:
    assert child.stdout is not None
    start, answer = time.monotonic(), None
    for line in child.stdout:
        if line.startswith(_RESULT):
            answer = json.loads(line[len(_RESULT) :])
        else:
            say(line.rstrip("\n"))
    code = child.wait()
    if answer is None:
        seconds = time.monotonic() - start
        late = f" after its {deadline_s:g} s deadline" if seconds >= deadline_s else ""
        raise PublishError(
            f"the publisher exited with {code}{late} without returning a result; if it had started "
            "to make the revision visible, the recovery process or the next upload finishes this; "
            "check with `miner-guard audit`"
        )
    if "error" in answer:
        raise PublishError(answer["error"])
    return Result(**answer["result"])


def main() -> None:
    """Entry point of the child."""
    request = json.load(sys.stdin)
    redactor = Redactor.from_environment(os.environ)

    def say(line: str) -> None:
        sys.stdout.write(redactor.text(line) + "\n")
        sys.stdout.flush()

    try:
        answer: dict[str, Any] = {"result": dataclasses.asdict(_publish(request, say))}
    except (PublishInProgress, Cancelled, PublishError, RepoError, OSError) as error:
        answer = {"error": redactor.text(str(error))}
        say(f"Model state upload failed: {error}")
    # Bypass the redactor, which mistakes a sha256 for a key; any error here is already redacted.
    sys.stdout.write(_RESULT + json.dumps(answer) + "\n")
    sys.stdout.flush()
    sys.exit(0 if "result" in answer else 1)


def _publish(request: dict[str, Any], say: Callable[[str], None]) -> Result:
    revision = Revision(**{**request["revision"], "folder": Path(request["revision"]["folder"])})
    repo = open_repo(RepoSettings(**request["repo"]))
    path = journal_path(Path(request["journal_folder"]), repo.label)
    with exclusively(path) as lock:
        recovery = start_recovery(request["repo"], path, lock)
        try:
            publisher = Publisher(repo, Journal(path), say, Retry(deadline_s=request["deadline_s"]))
            signal.signal(signal.SIGTERM, lambda *_: publisher.cancelled.set())
            say(f"Upload Model Start: tag {revision.tag}")
            result = publisher.publish(revision)
        except BaseException:
            # The recovery process completes a partly visible revision; do not wait for it.
            assert recovery.stdin is not None
            recovery.stdin.close()
            raise
        recovery.kill()
        recovery.wait()
    say(
        f"Successfully pushed new model state with tag {result.tag} to {result.label} "
        f"({result.size_bytes / 1e6:.1f} MB in {result.seconds:.1f}s, read back)"
    )
    return result


if __name__ == "__main__":
    main()
