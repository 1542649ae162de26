"""An imitation of the structure of subnet 38's base miner, limited to what an attached guard sees
of it."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class BaseMinerNeuron:
    local_progress: Any

    def __init__(self, config: Any = None) -> None:
        self.config = SimpleNamespace(
            neuron=SimpleNamespace(
                local_batch_size_train=2,
                local_batch_size_train_effective=8,
                upload_steps=2,
                global_model_name="imitation",
            )
        )
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.master = self.local_rank == 0
        if self.world_size > 1:
            dist.init_process_group("gloo")
            self.gloo_group = dist.new_group(backend="gloo")
        self.should_exit = False
        self.training_error: str | None = None

    def say(self, text: str) -> None:
        if self.master:
            # One write: the upload thread prints too, and between text and newline otherwise.
            print(f"{text}\n", end="", flush=True)

    def run(self) -> None:
        self.resume_training()
        try:
            while not self.should_exit:
                try:
                    self.training_active.wait()
                    dataset = self.training_loop.run_until_complete(self.fetch_training_data(7))
                    self._process_training_batch(dataset)
                except Exception as e:
                    self.say(f"Training Loop Failed with error: {e}")
                    self.training_error = str(e)
                    break
        except KeyboardInterrupt:
            self.should_exit = True

    training_active: threading.Event
    training_loop: Any

    def resume_training(self) -> None:
        raise NotImplementedError

    async def fetch_training_data(self, block: int) -> Any:
        raise NotImplementedError

    def _process_training_batch(self, dataset: Any) -> None:
        raise NotImplementedError


def seeded() -> None:
    torch.manual_seed(42)
