"""The progress of commands that take over a second: only on a terminal, and removed at the end."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

from miner_guard.cli.working import Working
from tests.support import requires


def test_the_line_tells_what_how_far_and_for_how_long() -> None:
    working = Working("reading the log", 200)
    working.advance(84)
    assert working.line(3.2) == "reading the log: 42%, 3 s"
    working.advance(900)
    assert working.line(3.2).startswith("reading the log: 100%"), "the file may grow meanwhile"
    assert Working("asking GPUs").line(2.0) == "asking GPUs, 2 s"


SLOW = """
import time
from miner_guard.cli.working import Working

with Working("reading what is published"):
    time.sleep(2)
print("done")
"""


def test_on_a_terminal_it_shows_after_a_second_and_leaves_nothing_behind() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=requires.REPO,
        env={**os.environ, "TERM": "xterm"},
    )
    out, _ = child.communicate(timeout=60)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 0)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:
            break
    os.close(ours)
    assert b"reading what is published, 1 s" in shown
    assert shown.endswith(b"\r\x1b[K")
    assert out == b"done\n"


def test_into_a_pipe_it_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW], capture_output=True, timeout=60, cwd=requires.REPO
    )
    assert done.stderr == b""
