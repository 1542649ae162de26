"""The hooks of `--attach auto` in this process, removed afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from miner_guard.attach.auto import Auto


@contextlib.contextmanager
def hooked(adapter: Any) -> Iterator[Auto]:
    """Hooks for a program that reports to `adapter`."""
    import torch
    from torch.optim import optimizer as module

    scaler = torch.amp.grad_scaler.GradScaler
    kept = torch.autograd.backward, torch.autograd.grad, scaler.scale
    added = module.Optimizer.add_param_group
    auto = Auto(adapter)
    auto.follow_torch(module)
    auto.follow_scaler(torch.amp.grad_scaler)
    try:
        yield auto
    finally:
        torch.autograd.backward, torch.autograd.grad, scaler.scale = kept
        module.Optimizer.add_param_group = added  # type: ignore[method-assign]
        module._global_optimizer_pre_hooks.clear()
        module._global_optimizer_post_hooks.clear()
