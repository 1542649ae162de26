"""Hooks a miner that does not call the hook: its source stays untouched.

`environment` is the supervisor's side. Everything else here runs INSIDE the miner's processes:
standard library and torch only; a failure never affects training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ATTACH = "_MINER_GUARD_ATTACH"
"""Which attach module the miner's processes use."""

MODULES = "_MINER_GUARD_ATTACH_MODULES"
"""Names of the modules whose import activates attaching, comma-separated."""

HOME = "_MINER_GUARD_HOME"
"""Folder of the package, for a miner whose Python does not have it installed."""

ATTACHED = "_MINER_GUARD_ATTACHED"
"""Set in a process that has attached: its child processes are not ranks."""

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
        "transformers.trainer",
        "lightning.pytorch.trainer.trainer",
        "pytorch_lightning.trainer.trainer",
    ),
}
"""By attach mode: the modules whose import we watch for."""

MODES = (*WATCHED, "log")


class UnknownAttach(ValueError):
    """Unknown attach mode; the message names the valid ones."""


def environment(mode: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """The miner's environment plus the variables that attaching needs. `mode` is one of MODES, or
    None.

    With `log` the guard only reads the miner's lines. Otherwise it puts a `sitecustomize` first on
    PYTHONPATH; it chains to an existing one. Raises UnknownAttach.
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
