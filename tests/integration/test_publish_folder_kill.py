"""Sends SIGKILL to a process that publishes to a folder, at each of its file operations: readers
always see a complete revision, or soon do."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miner_guard.uploads.journal import COMMITTING, Journal, journal_path
from miner_guard.uploads.publisher import Publisher, Revision
from miner_guard.uploads.repos.base import METADATA, ObjectInfo, epoch_key
from miner_guard.uploads.repos.local import LocalRepo
from miner_guard.validators.facts import Published
from miner_guard.validators.metadata import mixed
from tests.servers.revisions import OUTER_STEP, revision

SHOWN = (
    epoch_key(OUTER_STEP, "gradients.pt"),
    epoch_key(OUTER_STEP, "config.json"),
    epoch_key(OUTER_STEP, METADATA),
    METADATA,
)
_FILE_OPERATIONS = ("open", "os.rename", "os.remove", "os.utime", "os.mkdir")


def contents(of: Revision) -> dict[str, bytes]:
    """A revision as readers see it: its files, and the files that its metadata describes."""
    files = {key: path.read_bytes() for key, path in of.files()}
    described = {
        key.rpartition("/")[2]: {
            "size_bytes": len(files[key]),
            "checksum": hashlib.sha256(files[key]).hexdigest(),
        }
        for key in SHOWN[:2]
    }
    metadata = json.dumps({**json.loads(files[METADATA]), "files": described}).encode()
    return {**files, SHOWN[2]: metadata, METADATA: metadata}


class Folder:
    """A repo and its publisher's journal."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repo = LocalRepo(root / "repo")
        self.journal = journal_path(root / "journal", self.repo.label)

    def publisher(self) -> Publisher:
        return Publisher(self.repo, Journal(self.journal), lambda _line: None)

    def shown(self) -> dict[str, bytes]:
        return {key: (self.root / "repo" / key).read_bytes() for key in SHOWN}

    def killed_at(self, operation: int, what: Revision) -> bool:
        """Publish in a child that is killed before its `operation`-th file operation; returns
        whether it got that far."""
        child = multiprocessing.get_context("fork").Process(
            target=self._publish_until, args=(operation, what)
        )
        child.start()
        child.join(30)
        assert child.exitcode in (0, -signal.SIGKILL)
        return child.exitcode != 0

    def _publish_until(self, operation: int, what: Revision) -> None:
        sys.addaudithook(_killer(operation, str(self.root)))
        self.publisher().publish(what)


def _killer(operation: int, below: str) -> Callable[[str, tuple[Any, ...]], None]:
    left = operation

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _FILE_OPERATIONS and str(arguments[0]).startswith(below):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return audit


def is_mixed(seen: Published) -> bool:
    return mixed(seen.metadata, seen.size_bytes, seen.checksum) is not None


def test_killed_at_any_file_operation_the_folder_is_complete_or_completed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    before = revision(tmp_path, 50)
    folder.publisher().publish(before)
    undone = finished = 0
    for operation in range(1, 400):
        after = revision(tmp_path, 1000 + operation)
        if not folder.killed_at(operation, after):
            break
        old, new, seen = contents(before), contents(after), folder.shown()
        left = Journal(folder.journal).read()
        assert all(seen[key] in (old[key], new[key]) for key in SHOWN), (
            f"torn at operation {operation}"
        )
        if seen not in (old, new):
            assert (seen[SHOWN[0]], seen[METADATA]) == (new[SHOWN[0]], old[METADATA]), (
                "the metadata came first"
            )
            assert is_mixed(folder.repo.state()), (
                f"mixed at operation {operation}, and no reader could know"
            )
        committing = left is not None and left["phase"] == COMMITTING
        if not committing:
            assert seen in (old, new), (
                f"mixed at operation {operation}, and no process would finish it"
            )
        folder.publisher().recover()
        assert folder.shown() == (new if committing else seen)
        undone, finished = undone + (folder.shown() == old), finished + (folder.shown() == new)
        if folder.shown() == new:
            before = after
    else:
        pytest.fail("the publisher never came to its end")
    assert undone >= 10
    assert finished >= 10
    assert folder.shown() == contents(after)
    assert not list((tmp_path / "repo" / ".incoming").iterdir()), "leftovers of the killed ones"
    assert not is_mixed(folder.repo.state())


def test_a_probe_that_falls_between_two_revisions_is_repeated(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.publisher().publish(revision(tmp_path, 50))
    later = revision(tmp_path, 60)

    class SwitchesAfterTheMetadataWasRead(LocalRepo):
        looks = 0

        def head(self, key: str) -> ObjectInfo:
            self.looks += 1
            if self.looks == 1:
                folder.publisher().publish(later)
            return super().head(key)

    repo = SwitchesAfterTheMetadataWasRead(tmp_path / "repo")
    assert (repo.state().revision, repo.looks) == ("1.3.60", 2)


def test_an_upload_whose_staged_files_are_gone_is_replaced_by_the_next(tmp_path: Path) -> None:
    folder, lines = Folder(tmp_path), list[str]()
    before = revision(tmp_path, 50)
    folder.publisher().publish(before)
    for operation in range(1, 400):
        assert folder.killed_at(operation, revision(tmp_path, 1000 + operation))
        left = Journal(folder.journal).read()
        if left is not None and left["phase"] == COMMITTING:
            break
    for draft in (tmp_path / "repo" / ".incoming").iterdir():
        draft.unlink()
    (tmp_path / "repo" / SHOWN[0]).unlink()
    after = revision(tmp_path, 60)
    Publisher(folder.repo, Journal(folder.journal), lines.append).publish(after)
    assert folder.shown() == contents(after)
    assert any("can't be finished" in line and "this upload replaces it" in line for line in lines)


_DIES = """
import os, signal, sys
from pathlib import Path
from miner_guard.uploads.recovery_process import start
recovery = start({}, Path(sys.argv[1]), os.open(sys.argv[1], os.O_RDWR | os.O_CREAT))
os.kill(recovery.pid, signal.SIGSTOP)
print(recovery.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_waiting_for_a_killed_publisher_does_not_include_its_recovery(tmp_path: Path) -> None:
    """The miner once waited two more minutes, because the recovery process held the pipe that the
    miner reads."""
    command = [sys.executable, "-c", _DIES, str(tmp_path / "journal")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        recovery = int(publisher.stdout.readline())
        try:
            ready, _, _ = select.select([publisher.stdout], [], [], 30)
            assert ready, "the pipe has not come to its end"
            assert publisher.stdout.read() == ""
        finally:
            os.kill(recovery, signal.SIGKILL)
