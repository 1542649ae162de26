"""Attaches to a miner that does not call the hook itself, without changing its source.

The supervisor calls `environment`. Everything else here runs INSIDE the miner's processes: it uses
only the standard library and torch, and a failure never affects training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ATTACH = "_MINER_GUARD_ATTACH"
"""Environment variable: the attach mode, which is the module that the miner's processes use."""

MODULES = "_MINER_GUARD_ATTACH_MODULES"
"""Environment variable: the modules whose import activates attaching, comma-separated."""

HOME = "_MINER_GUARD_HOME"
"""Environment variable: the folder that holds this package, for a miner whose Python lacks it."""

ATTACHED = "_MINER_GUARD_ATTACHED"
"""Environment variable: the pid of the process that has attached. Its child processes are not
ranks."""

WATCHED: Mapping[str, tuple[str, ...]] = {
    "sn38": (
        "distributed_training.base.miner",
        "template.base.miner",
        "distributed_training.utils.state_loader",
    ),
    "auto": (
        "torch.optim.optimizer",
        "torch.amp.grad_scaler",
        "torch.utils.data.dataloader",
        "torch._dynamo.eval_frame",
        "transformers.trainer",
        "lightning.pytorch.trainer.trainer",
        "pytorch_lightning.trainer.trainer",
    ),
}
"""The modules whose import the miner's processes watch for, by attach mode."""

MODES = (*WATCHED, "log")


class UnknownAttach(ValueError):
    """Unknown attach mode; the message names the valid ones."""


def environment(mode: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """The miner's environment `env` plus the variables that attaching needs. `mode` is one of
    MODES, or None.

    In mode `log` the guard only reads the miner's output. In any other mode it puts its own
    `sitecustomize` first on PYTHONPATH, which also runs an existing one. Raises UnknownAttach.
    """
    result = {name: value for name, value in env.items() if name != ATTACHED}
    if mode in (None, "log"):
        return result
    if mode not in WATCHED:
        raise UnknownAttach(f"--attach {mode}: unknown mode; allowed: {', '.join(MODES)}")
    here = Path(__file__).resolve().parent
    path = [str(here / "site"), *filter(None, env.get("PYTHONPATH", "").split(":"))]
    return {
        **result,
        "PYTHONPATH": ":".join(dict.fromkeys(path)),
        ATTACH: mode,
        MODULES: ",".join(WATCHED[mode]),
        HOME: str(here.parent.parent),
    }
