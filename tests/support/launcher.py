"""Starts ranks with torchrun's variables: `launcher.py RANKS IMPORTS SCRIPT ARGUMENT…`, or with `-m
MODULE` in place of a script.

The ranks are forks of one process that has imported torch: the import costs seconds of CPU, which
are spent only once instead of for each rank and for torchrun. Tests of ranks use this module; tests
of the launcher itself start torchrun. `Preloaded` keeps such a process for many runs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from miner_guard import attach

TRAINING = ("torch._dynamo", "torch.distributed.checkpoint.state_dict")
"""Modules that every training run imports by its first step: with torch, two to four seconds of
CPU."""

MAX_RUN_S = 150
"""A run of `Preloaded` that takes longer is killed."""


def launch(ranks: int, *script: str, imports: Sequence[str] = ("torch",)) -> list[str]:
    """The command that starts `ranks` ranks of a script, or of `-m MODULE`, with its arguments. The
    ranks share the modules that all of them import."""
    return [sys.executable, "-u", __file__, str(ranks), ",".join(imports), *script]


_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port for a server that can't take one of the kernel's choice. Until this process ends, no
    other test gets it, nor does the kernel give it to a program that asks for any port."""
    while True:
        port = random.randrange(10_000, 32_000)
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0miner-guard-test-port-{port}")
            with socket.socket() as free:
                free.bind(("0.0.0.0", port))
        except OSError:
            mark.close()
        else:
            _reserved.append(mark)
            return port


class Preloaded:
    """A process that has imported torch and more; each run is a fork of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._asks, self._answers = process.stdin, process.stdout

    def run(
        self, *script: str, ranks: int, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run the script; returns its output once it has ended. Runs without a launcher if `ranks`
        is 0. Attaches as a Python process started with this environment would."""
        output = [cwd / "printed.stdout", cwd / "printed.stderr"]
        request = {"ranks": ranks, "script": script, "cwd": str(cwd), "env": dict(env)}
        print(
            json.dumps({**request, "output": list(map(str, output))}), file=self._asks, flush=True
        )
        code = int(self._answers.readline())
        printed, errors = (path.read_text() for path in output)
        return subprocess.CompletedProcess(script, code, printed, errors)


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[Preloaded]:
    """A process that has imported torch and `modules`."""
    command = [sys.executable, "-u", __file__, "serve", *modules]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield Preloaded(process)
        process.communicate()


def main(ranks: int, imports: str, *script: str) -> int:
    """Returns the exit code of the first rank that fails, after the others have ended; otherwise
    0."""
    port = free_port()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    _preload(*imports.split(","))
    if script[0] == "-m":
        sys.path[0] = os.getcwd()
        _preload(script[1])
        # As __main__ it runs again.
        del sys.modules[script[1]]
    running: set[int] = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            # Held until the process is gone: a rank that frees a DDP model waits for gloo's thread,
            # which may be waiting for the GIL to free the last collective (torch 2.13).
            held = _run(script)  # noqa: F841
            _leave()
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
        # The exit code of a rank killed by a signal, as a shell reports it.
        ended = os.waitstatus_to_exitcode(status)
        if ended and not code:
            code = ended if ended > 0 else 128 - ended
            end()
    return code


def serve(*modules: str) -> int:
    """Run each request from stdin in a fork, one after the other."""
    os.environ["OMP_NUM_THREADS"] = "1"
    _preload(*TRAINING, *modules)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            return _answer(json.loads(line))
        signal.alarm(MAX_RUN_S)
        _, status = os.waitpid(pid, 0)
        signal.alarm(0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


def _answer(request: Mapping[str, Any]) -> int:
    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, path in enumerate((os.devnull, *request["output"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    # As Python does on startup; only attaching needs it here.
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    if attach.ATTACH in os.environ:
        # Debian's Python has one of its own, and has loaded it already.
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if request["ranks"]:
        return main(request["ranks"], "torch", *request["script"])
    _run(request["script"])
    return 0


def _preload(*modules: str) -> None:
    # Garbage collection would take a fifth of the CPU time of such large imports and free nothing.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _leave() -> NoReturn:
    """End this process after its exit handlers, as the interpreter would, and free nothing."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(script: Sequence[str]) -> dict[str, Any]:
    """Run the script as `__main__`; returns its variables."""
    _attach_to_imported()
    if script[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = list(script[1:])
        return runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    sys.path[0] = str(Path(script[0]).parent)
    sys.argv = list(script)
    return runpy.run_path(script[0], run_name="__main__")


def _attach_to_imported() -> None:
    """Tell an attached guard of the imports that happened before the fork."""
    for finder in sys.meta_path:
        if type(finder).__name__ == "Watch":
            for name in sorted(finder.names & sys.modules.keys()):
                finder.names.discard(name)
                finder.imported(name, sys.modules[name])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve(*sys.argv[2:]))
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
