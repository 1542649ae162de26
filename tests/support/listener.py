"""A process that takes over the ranks' records, as a guard does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from miner_guard.rank.wire import WIRE

_LISTENER = """
import select
from tests.support.ranks import Ranks
ranks = Ranks()
print(ranks.wire.address, flush=True)
while True:
    ranks.wire.poll()
    connections = [caller.connection for caller in ranks.callers]
    for each in select.select(connections, (), (), 0.05)[0]:
        if not each.recv(65536):
            ranks.callers.clear()
"""


@dataclass(frozen=True)
class Listener:
    process: subprocess.Popen[str]
    env: dict[str, str]
    """What a rank needs in its environment."""


@contextmanager
def listening() -> Iterator[Listener]:
    """A process that hears the ranks, killed after the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LISTENER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        assert process.stdout is not None
        yield Listener(process, {WIRE: process.stdout.readline().strip()})
    finally:
        process.kill()
        process.communicate()
