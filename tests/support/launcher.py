"""Starts ranks with torchrun's variables: `launcher.py RANKS SCRIPT ARGUMENT…`, or `-m MODULE`.

The ranks are forks of one process that has imported torch: the import, seconds of CPU, is paid once
instead of once for each rank and once for torchrun. For the tests of what ranks do; the tests of
what a launcher does start torchrun.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

from miner_guard import attach


def launch(ranks: int, *script: str) -> list[str]:
    """The command that starts `ranks` ranks of a script, or of `-m MODULE`, with its arguments."""
    return [sys.executable, "-u", __file__, str(ranks), *script]


def main(ranks: int, *script: str) -> int:
    """The exit code of the first rank that fails, after the others have ended; else 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    sys.path[0] = os.getcwd() if script[0] == "-m" else str(Path(script[0]).parent)
    # In this mode the import attaches to the process, which then is a rank itself.
    if os.environ.get(attach.ATTACH) != "auto":
        _preload(script)
    running: set[int] = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            _run(script)
            return 0
        running.add(pid)

    def end(*_: object) -> None:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    code = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        # A rank that a signal ended, as a shell reports it.
        ended = os.waitstatus_to_exitcode(status)
        if ended and not code:
            code = ended if ended > 0 else 128 - ended
            end()
    return code


def _preload(script: tuple[str, ...]) -> None:
    # Garbage collection costs an import of this size a sixth of its CPU and frees nothing.
    gc.disable()
    import torch.distributed  # noqa: F401

    if script[0] == "-m":
        importlib.import_module(script[1])
        # As __main__ it runs again.
        del sys.modules[script[1]]
    gc.freeze()
    gc.enable()


def _run(script: tuple[str, ...]) -> None:
    if script[0] == "-m":
        sys.argv = list(script[1:])
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(script)
        runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
