"""`python -m tests.benchmarks.peer_faults [NAME…]`: ten faults under miner-guard and its peers.

`yes` means that the supervisor handled the fault on its own within the limit; after `no`, the table
says what happened instead. For a peer that can't run here, it says why. Freezing a disk requires
root.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks.peers import PEERS, Peer, until
from tests.faults.own_disk import OwnDisk

BACK_S = 20.0
GONE_S = 25.0
STEP_S = 0.05


def _started(peer: Peer, *, blocked: bool = False) -> None:
    peer.start(blocked=blocked)
    if not until(lambda: peer.steps() > 10 and len(peer.left()) >= 3, 90):
        raise RuntimeError(f"did not start: {peer.last_line()}")


def _back(peer: Peer) -> str:
    again = until(lambda: len(peer.births()) > 1, BACK_S)
    return "yes" if again else f"no: not in {BACK_S:.0f} s"


def _gone(peer: Peer, seconds: float = GONE_S) -> str:
    until(lambda: not peer.left(), seconds)
    left = len(peer.left())
    return "yes" if not left else f"no: {left} left"


def crash(peer: Peer, _disk: OwnDisk) -> str:
    _started(peer)
    return _back(peer)


def kill(peer: Peer, _disk: OwnDisk) -> str:
    _started(peer)
    os.kill(peer.births()[0].pid, signal.SIGKILL)
    return _back(peer)


def blocked_signals(peer: Peer, _disk: OwnDisk) -> str:
    _started(peer, blocked=True)
    os.kill(peer.births()[0].pid, signal.SIGKILL)
    return _back(peer)


def orphans_of_a_launch(peer: Peer, _disk: OwnDisk) -> str:
    _started(peer)
    before = peer.left()
    os.kill(peer.births()[0].pid, signal.SIGKILL)
    if not until(lambda: len(peer.births()) > 1, BACK_S):
        return "no: not restarted"
    until(lambda: not peer.left() & before, 5)
    left = len(peer.left() & before)
    return "yes" if not left else f"no: {left} left"


def stop(peer: Peer, _disk: OwnDisk) -> str:
    _started(peer)
    peer.stop()
    return _gone(peer)


def own_sigkill(peer: Peer, _disk: OwnDisk) -> str:
    _started(peer)
    os.kill(peer.supervisor, signal.SIGKILL)
    return _gone(peer)


def frozen_steps(peer: Peer, disk: OwnDisk) -> str:
    _started(peer)
    disk.freeze()
    before, began = peer.steps(), time.monotonic()
    time.sleep(8.0)
    rate = (peer.steps() - before) / (time.monotonic() - began) * STEP_S
    return "yes" if rate > 0.5 else f"no: {rate:.0%} of the steps"


def frozen_stop(peer: Peer, disk: OwnDisk) -> str:
    _started(peer)
    disk.freeze()
    peer.stop()
    return _gone(peer)


FAULTS: tuple[tuple[str, str, Callable[[Peer, OwnDisk], str]], ...] = (
    ("crash: back", "crash", crash),
    ("SIGKILL: back", "none", kill),
    ("dies, every signal blocked by the parent: back", "none", blocked_signals),
    ("hang: back", "hang", crash),
    ("a dead launch's orphans: gone", "none", orphans_of_a_launch),
    ("stop: nothing left", "none", stop),
    ("stop of a deaf child: nothing left", "deaf", stop),
    ("its own SIGKILL: nothing left", "none", own_sigkill),
    ("its disk frozen: steps continue", "none", frozen_steps),
    ("stop with its disk frozen: nothing left", "none", frozen_stop),
)


def _cell(kind: type[Peer], fault: str, judge: Callable[[Peer, OwnDisk], str]) -> str:
    with tempfile.TemporaryDirectory() as base:
        disk = OwnDisk(Path(base), 64)
        (disk.place / "logs").mkdir()
        folder = Path(base) / "child"
        folder.mkdir()
        peer = kind(folder, disk.place / "logs", fault)
        try:
            return judge(peer, disk)
        except (RuntimeError, OSError, IndexError) as error:
            return f"no: {error}"
        finally:
            disk.thaw()
            peer.clean()
            disk.close()


def main(names: Sequence[str]) -> None:
    print(f"| | {' | '.join(words for words, _, _ in FAULTS)} | of {len(FAULTS)} |")
    print("|---" * (len(FAULTS) + 2) + "|")
    for kind in PEERS:
        if names and kind.name not in names:
            continue
        if (reason := kind.missing()) is not None:
            print(f"| {kind.name} | {reason} |")
            continue
        cells = []
        for words, fault, judge in FAULTS:
            cells.append(_cell(kind, fault, judge).replace("\n", " "))
            print(f"{kind.name}: {words}: {cells[-1]}", file=sys.stderr, flush=True)
        print(f"| {kind.name} | {' | '.join(cells)} | {cells.count('yes')} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
