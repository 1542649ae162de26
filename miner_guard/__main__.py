"""The entry point of `miner-guard`, and of `python -m miner_guard`.

`run` and `demo` start a keeper first, which runs the same command line again for its guard; the
keeper's process imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; exits with the codes defined in `miner_guard.exits`."""
    from miner_guard.keeper.link import KEEPER_FD, MINER_COMMANDS

    if sys.argv[1:2] and sys.argv[1] in MINER_COMMANDS and KEEPER_FD not in os.environ:
        from miner_guard.keeper.keeper import keep

        # A normal exit would wait for a thread that writes to a stuck reader.
        os._exit(keep())
    from miner_guard.cli.main import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
