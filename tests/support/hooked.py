"""The hooks of `--attach auto` in this process, removed afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from miner_guard.attach.auto import Auto


def hooks() -> tuple[Any, ...]:
    """What `--attach auto` replaces in torch, as it is now."""
    import torch
    from torch.optim import optimizer as module

    scaler, optimizer = torch.amp.grad_scaler.GradScaler, module.Optimizer
    around = module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks
    functions = torch.autograd.backward, torch.autograd.grad, scaler.scale
    return *functions, optimizer.add_param_group, *map(dict, around)


def put(hooks: tuple[Any, ...]) -> None:
    """Make torch what it was when `hooks` was read."""
    import torch
    from torch.optim import optimizer as module

    torch.autograd.backward, torch.autograd.grad, scale, added, before, after = hooks
    torch.amp.grad_scaler.GradScaler.scale = scale  # type: ignore[method-assign]
    module.Optimizer.add_param_group = added  # type: ignore[method-assign]
    for now, then in (
        (module._global_optimizer_pre_hooks, before),
        (module._global_optimizer_post_hooks, after),
    ):
        now.clear()
        now.update(then)


@contextlib.contextmanager
def hooked(adapter: Any) -> Iterator[Auto]:
    """Hooks for a program that reports to `adapter`."""
    import torch
    from torch.optim import optimizer as module

    before, auto = hooks(), Auto(adapter)
    auto.follow_torch(module)
    auto.follow_scaler(torch.amp.grad_scaler)
    try:
        yield auto
    finally:
        put(before)
