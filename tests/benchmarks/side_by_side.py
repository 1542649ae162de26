"""`python -m tests.benchmarks.side_by_side [NAME…]`: how soon each supervisor restarts its child.

Prints the seconds from the fault to the child's next start, and the processes left after the
supervisor's own SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks.peers import HANG_LIMIT_S, PEERS, Peer, until

_LEFT_S = 6.0


def relaunch(peer: Peer, fault: str) -> str:
    """Seconds from the fault to the next start, as text."""
    peer.start()
    if not until(lambda: peer.steps() > 10, 90):
        return f"did not start: {peer.last_line()}"
    if fault == "sigkill":
        at = time.time()
        os.kill(peer.births()[0].pid, signal.SIGKILL)
    else:
        until(peer.failed, 60)
        at = peer.failed() or time.time()
    if not until(lambda: len(peer.births()) > 1, 20):
        return "never (20 s)"
    return f"{peer.births()[1].at - at:.2f} s"


def orphans(peer: Peer, _fault: str) -> str:
    """Processes left after the supervisor's own SIGKILL, as text."""
    peer.start()
    if not until(lambda: len(peer.left()) >= 3, 90):
        return f"did not start: {peer.last_line()}"
    os.kill(peer.supervisor, signal.SIGKILL)
    until(lambda: not peer.left(), _LEFT_S)
    return str(len(peer.left()))


COLUMNS: tuple[tuple[str, str, Callable[[Peer, str], str]], ...] = (
    ("crash -> relaunch", "crash", relaunch),
    ("SIGKILL -> relaunch", "sigkill", relaunch),
    (f"hang ({HANG_LIMIT_S:g} s limit) -> relaunch", "hang", relaunch),
    ("left after its own SIGKILL", "none", orphans),
)


def _cell(kind: type[Peer], fault: str, measure: Callable[[Peer, str], str]) -> str:
    with tempfile.TemporaryDirectory() as base:
        folder, logs = Path(base) / "child", Path(base) / "logs"
        folder.mkdir()
        logs.mkdir()
        peer = kind(folder, logs, fault)
        try:
            return measure(peer, fault)
        finally:
            peer.clean()


def main(names: Sequence[str]) -> None:
    print(f"| | {' | '.join(words for words, _, _ in COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for kind in PEERS:
        if names and kind.name not in names:
            continue
        if (reason := kind.missing()) is not None:
            print(f"| {kind.name} | {reason} |")
            continue
        cells = [_cell(kind, fault, measure) for _, fault, measure in COLUMNS]
        print(f"| {kind.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
