"""Replaces utils/state_loader.py: a small model sharded across the ranks, its optimizers, and the
averager; the real averager exchanges gradients with other miners."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from miner_guard.validators import checkout, states
from tests.truth.miner import neuron


class Config(SimpleNamespace):
    """The model's config, which transformers writes as config.json."""

    def save_pretrained(self, folder: str) -> None:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(vars(self), file, indent=2, sort_keys=True)


class Output(NamedTuple):
    """The model's output: a container in which FSDP finds the tensors."""

    loss: Any


def model() -> Any:
    """The model of the truth table."""
    made = checkout.model_of(torch, states.SHAPES)
    made.register_forward_hook(lambda _module, _inputs, output: Output(output.loss))
    return made


class Averager:
    """The pseudo-gradients of rank 0, not averaged with any other miner's."""

    def __init__(self, parameters: list[Any]) -> None:
        self._tensors = [torch.zeros_like(parameter) for parameter in parameters]
        self.matchmaking_kwargs: dict[str, Any] = {}

    @contextlib.contextmanager
    def get_tensors(self) -> Iterator[list[Any]]:
        yield self._tensors


def load_state_from_peer(
    miner: Any, uid: int | None = None, epoch: int | None = None, **_: Any
) -> bool:
    """Build the model as it is at the start of `epoch`."""
    _build(miner)
    module = importlib.import_module("distributed_training.utils.progress_tracker")
    if hasattr(module, "get_progress"):
        whose = "global" if uid in (None, miner.master_uid) else "local"
        miner.local_progress.inner_step = module.get_progress(miner, whose)[1]
    miner.local_progress.epoch = epoch
    miner.local_progress.samples_accumulated = 0
    miner.logger.info(f"New Model Tag: {epoch}")
    return True


def _build(miner: Any) -> None:
    torch.manual_seed(42)
    miner.model = model()
    if miner.world_size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(miner.model, mesh=init_device_mesh("cpu", (miner.world_size,)))
    miner.model.config = Config(architectures=["Tiny"], hidden_size=128, block_list=[])
    miner.inner_optimizer = torch.optim.AdamW(miner.model.parameters(), lr=1e-3)
    miner.scheduler = torch.optim.lr_scheduler.LambdaLR(miner.inner_optimizer, lambda _: 1.0)
    whole = get_model_state_dict(
        miner.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    offloaded = [torch.nn.Parameter(tensor.clone()) for tensor in whole.values()]
    if miner.master:
        miner.outer_optimizer = torch.optim.SGD(offloaded, lr=0.7, momentum=0.9, nesterov=True)
        miner.grad_averager = Averager(offloaded)
    miner.avg_handler = SimpleNamespace()
    neuron.miner = miner


def cleanup_old_cache(*_: Any, **__: Any) -> None:
    """Nothing is cached."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None
