"""The miner's log lines, in the format of subnet 38's miner; the guard logs separately."""

from __future__ import annotations

import sys
from datetime import datetime


class MinerLog:
    """Prints `time | level | Rank n | message`. As in subnet 38's miner, ranks other than 0 print
    only errors."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def info(self, message: str) -> None:
        """Print an info line, on rank 0 only."""
        if self._rank == 0:
            self._print("INFO", message)

    def error(self, message: str) -> None:
        """Print an error line, on any rank."""
        self._print("ERROR", message)

    def _print(self, level: str, message: str) -> None:
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        # Write each line in one call: several ranks share the pipe, and their lines must not
        # interleave.
        sys.stdout.write(f"{stamp} | {level:^14} | Rank {self._rank} | {message}\n")
        sys.stdout.flush()
