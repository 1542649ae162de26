"""Imitates the state loader: a model that all ranks hold a shard of."""

from __future__ import annotations

from typing import Any

import torch


def load_state_from_peer(self: Any, uid: int | None = None, epoch: int | None = None) -> None:
    torch.manual_seed(42)
    self.model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    if self.world_size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world_size,)))
    self.inner_optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
    self.say(f"Loaded state for epoch {epoch}")
