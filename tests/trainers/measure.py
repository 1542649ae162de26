"""What attaching adds to a step of one script: measure.py SCRIPT ARG…

Runs the script with the hook attached and detached in blocks of steps, in alternation within one
process, so that both meet the same machine; prints the medians of the thread's CPU time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.optim.optimizer as optimizer_module

from miner_guard.attach import auto
from miner_guard.state_dir import StateDir

_BLOCK = 6
"""Steps of a block; the first is left out: the hook's code has not run for a block then, which no
attached program meets."""

_WARM_UP = 40
"""Steps at the start that are left out: the hook learns the program's cycle of optimizers."""

_ENOUGH = 200
_MAX_RUNS = 40


class Toggle:
    """Attaches and detaches the hook, and takes the CPU time of each step."""

    def __init__(self) -> None:
        self.attached: list[float] = []
        self.alone: list[float] = []
        self._on = True
        self._place = 0
        self._count = 0
        self._last: float | None = None
        self._plain: Any = torch.Tensor.backward
        auto.imported("torch.optim.optimizer", optimizer_module)
        self._hooked: Any = torch.Tensor.backward
        self._pre = dict(optimizer_module._global_optimizer_pre_hooks)
        self._post = dict(optimizer_module._global_optimizer_post_hooks)
        optimizer_module.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_step: Any) -> None:
        now = time.thread_time()
        self._count += 1
        if self._last is not None and self._place and self._count > _WARM_UP:
            (self.attached if self._on else self.alone).append(now - self._last)
        self._place = (self._place + 1) % _BLOCK
        if self._place == 0:
            self._switch()
        self._last = time.thread_time()

    def _switch(self) -> None:
        self._on = not self._on
        setattr(torch.Tensor, "backward", self._hooked if self._on else self._plain)  # noqa: B010
        for hooks, own in (
            (optimizer_module._global_optimizer_pre_hooks, self._pre),
            (optimizer_module._global_optimizer_post_hooks, self._post),
        ):
            if self._on:
                for number, hook in own.items():
                    hooks[number] = hook
                    hooks.move_to_end(number, last=False)
            else:
                for number in own:
                    del hooks[number]

    def new_run(self) -> None:
        self._last = None


def main() -> None:
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, os.path.dirname(script))
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor,
    ):
        # It never reads; that it is there keeps the hook on the path of a supervised rank.
        supervisor.bind(str(StateDir(Path(folder)).socket))
        os.environ["_MINER_GUARD_STATE_DIR"] = folder
        toggle = Toggle()
        for _ in range(_MAX_RUNS):
            toggle.new_run()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                runpy.run_path(script, run_name="__main__")
            if len(toggle.attached) >= _ENOUGH:
                break
        alone = statistics.median(toggle.alone)
        added = statistics.median(toggle.attached) - alone
    print(
        json.dumps({"alone_ms": alone * 1e3, "added_us": added * 1e6, "steps": len(toggle.alone)})
    )


if __name__ == "__main__":
    main()
