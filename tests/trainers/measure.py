"""Measures the time that attaching adds to a script's steps: measure.py MODULES SCRIPT ARG…

MODULES: the modules other than torch that the script imports, comma-separated; may be empty. Runs
the script in one process, with the hook attached and detached in alternating blocks of steps, so
that both run under the same conditions; prints the medians of the thread's CPU time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import random
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.optim.optimizer as optimizer_module
from torch.amp import grad_scaler
from torch.utils.data import dataloader

from miner_guard.attach import auto
from tests.support.listener import listening

_BLOCK = 6
"""Steps per block. The first is not counted: the hook has not run during the previous block, which
never happens in an attached program."""

_WARM_UP = 40
"""Steps at the start that are not counted, because the hook is still learning the program's cycle
of optimizers."""

_ENOUGH = 100
_MAX_RUNS = 40


_FRAMEWORKS = {
    "transformers": "transformers.trainer",
    "lightning": "lightning.pytorch.trainer.trainer",
}
"""The module to hook for each framework with callbacks. A trainer picks up the hook when it is
created, so only a script with one block (six steps) is measured correctly."""


def _owners(modules: Sequence[Any]) -> list[Any]:
    """The classes and modules that attaching changes."""
    trainers = [module.Trainer for module in modules if hasattr(module, "Trainer")]
    torchs = [torch.autograd, optimizer_module.Optimizer, grad_scaler.GradScaler]
    return [*torchs, dataloader._BaseDataLoaderIter, *trainers]


class Toggle:
    """Attaches and detaches the hook, and measures the CPU time of each step."""

    def __init__(self, frameworks: Sequence[str]) -> None:
        """`frameworks`: modules with a Trainer, hooked too."""
        self.blocks: list[tuple[bool, list[float]]] = []
        """Whether the hook was attached, and the seconds of each step."""

        self._on = True
        self._chance = random.Random(1)
        self._place = 0
        self._count = 0
        self._last: float | None = None
        modules = [optimizer_module, grad_scaler, dataloader, *map(import_module, frameworks)]
        owners = _owners(modules)
        before = [dict(vars(owner)) for owner in owners]
        for module in modules:
            auto.imported(module.__name__, module)
        self._patched = [
            (owner, name, plain.get(name, value), value)
            for owner, plain in zip(owners, before, strict=True)
            for name, value in vars(owner).items()
            if plain.get(name) is not value
        ]
        """Owner, name, and the attribute without and with the hook."""
        self._pre = dict(optimizer_module._global_optimizer_pre_hooks)
        self._post = dict(optimizer_module._global_optimizer_post_hooks)
        optimizer_module.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_step: Any) -> None:
        now = time.thread_time()
        self._count += 1
        if self._last is not None and self._place and self._count > _WARM_UP:
            if not self.blocks or self.blocks[-1][0] != self._on:
                self.blocks.append((self._on, []))
            self.blocks[-1][1].append(now - self._last)
        self._place = (self._place + 1) % _BLOCK
        # Alternate at random: a strict alternation could fall into step with epochs of ten steps.
        if self._place == 0 and self._chance.random() < 0.5:
            self._switch()
        self._last = time.thread_time()

    def _switch(self) -> None:
        self._on = not self._on
        for owner, name, plain, hooked in self._patched:
            setattr(owner, name, hooked if self._on else plain)
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

    @property
    def steps(self) -> int:
        """How many steps were timed without the hook."""
        return sum(len(seconds) for on, seconds in self.blocks if not on)

    def figures(self) -> tuple[float, float, float]:
        """Seconds of a step without the hook, what the hook adds, and twice the standard error of
        that: the median over neighbouring blocks, so that changes in the machine's speed during the
        run cancel out."""
        added, alone = [], []
        for (on, first), (_, second) in itertools.pairwise(self.blocks):
            if len(first) < _BLOCK - 1 or len(second) < _BLOCK - 1:
                continue
            pair = statistics.median(first), statistics.median(second)
            added.append(pair[0] - pair[1] if on else pair[1] - pair[0])
            alone.append(pair[1] if on else pair[0])
        low, _, high = statistics.quantiles(added, n=4)
        # Standard error of a median, from the interquartile range, for normal noise: 1.25 sd /
        # sqrt(n), sd = IQR/1.35.
        error = 1.25 * (high - low) / 1.35 / math.sqrt(len(added))
        return statistics.median(alone), statistics.median(added), 2 * error

    def new_run(self) -> None:
        self._last = None


def main() -> None:
    frameworks = [_FRAMEWORKS[name] for name in sys.argv[1].split(",") if name in _FRAMEWORKS]
    script, sys.argv = sys.argv[2], sys.argv[2:]
    sys.path.insert(0, os.path.dirname(script))
    with tempfile.TemporaryDirectory() as folder, listening() as listener:
        os.environ.update({"_MINER_GUARD_STATE_DIR": folder, **listener.env})
        toggle = Toggle(frameworks)
        for _ in range(_MAX_RUNS):
            toggle.new_run()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                runpy.run_path(script, run_name="__main__")
            if toggle.steps >= _ENOUGH:
                break
        alone, added, noise = toggle.figures()
    figures = {"alone_ms": alone * 1e3, "added_us": added * 1e6, "noise_us": noise * 1e6}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
