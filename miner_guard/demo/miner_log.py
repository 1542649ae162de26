"""The miner's own log lines, in the form of subnet 38's miner; the guard's are the guard's."""

from __future__ import annotations

import sys
from datetime import datetime


class MinerLog:
    """Prints `time | level | Rank n | message`. As upstream, ranks other than 0 print their errors
    only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def info(self, message: str) -> None:
        """A line of rank 0."""
        if self._rank == 0:
            self._print("INFO", message)

    def error(self, message: str) -> None:
        """A line of any rank."""
        self._print("ERROR", message)

    def _print(self, level: str, message: str) -> None:
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        # One write per line: lines of several ranks share the pipe, and must not be cut by one
        # another.
        sys.stdout.write(f"{stamp} | {level:^14} | Rank {self._rank} | {message}\n")
        sys.stdout.flush()
