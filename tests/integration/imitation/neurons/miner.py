"""Imitates the miner's class in its versions since 2025-03; SHAPE names one by its month."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from distributed_training.base.miner import BaseMinerNeuron
from distributed_training.utils.state_loader import load_state_from_peer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

SHAPE = os.environ.get("SHAPE", "2025-12")
LAST_STEP = int(os.environ.get("LAST_STEP", "7"))
STEP_S = float(os.environ.get("STEP_S", "0"))
FAIL_AT = int(os.environ.get("FAIL_AT", "-1"))
WORKER = Path(
    os.path.abspath(__file__).replace(
        "neurons/miner.py", "distributed_training/utils/upload_worker.py"
    )
)


class Miner(BaseMinerNeuron):
    def __init__(self, config: Any = None) -> None:
        super(Miner, self).__init__(config=config)  # noqa: UP008 - as upstream writes it
        self._init_training_components()
        self.local_progress = SimpleNamespace(
            epoch=1, inner_step=0, loss=0.0, samples_accumulated=0
        )
        self._load_model()
        self.running_loss, self.batch_count = 0.0, 0
        self.upload(archive=False)

    def _init_training_components(self) -> None:
        self.training_active = threading.Event()
        self.training_active.set()
        self.training_loop = asyncio.new_event_loop()
        self.upload_executor = ThreadPoolExecutor(max_workers=1)
        self.current_upload_future: Future[Any] | None = None
        self.upload_process: subprocess.Popen[bytes] | None = None

    def _load_model(self) -> None:
        load_state_from_peer(self, uid=3, epoch=self.local_progress.epoch)

    async def fetch_training_data(self, block: int) -> Any:
        generator = torch.Generator().manual_seed(block)
        inputs = torch.randn(64, 2, 8, generator=generator)
        return [(batch, batch.sum(-1, keepdim=True)) for batch in inputs]

    def maybe_sync_and_reload(self) -> None:
        if self.world_size > 1:
            dist.broadcast(torch.tensor([0]), src=0, group=self.gloo_group)

    def pause_training(self) -> None:
        self.training_active.clear()

    def resume_training(self) -> None:
        self.training_active.set()

    def _process_training_batch(self, dataset: Any) -> None:
        for inputs, labels in dataset:
            self.maybe_sync_and_reload()
            loss = torch.nn.functional.mse_loss(self.model(inputs), labels)
            if self.local_progress.inner_step == FAIL_AT:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            (loss / 4).backward()
            self.running_loss += loss.item()
            self.batch_count += 1
            self.local_progress.loss = self.running_loss / self.batch_count
            self.local_progress.samples_accumulated += 2
            if self.local_progress.samples_accumulated < 8:
                continue
            self.say(
                f"Outer Step: {self.local_progress.epoch} | Inner Step: {self.local_progress.inner_step} | "
                f"Learning Rate: {self.inner_optimizer.param_groups[0]['lr']:.8f} | "
                f"Average Loss: {self.local_progress.loss:.6f}"
            )
            time.sleep(STEP_S)
            self.inner_optimizer_step()
            if self.local_progress.inner_step % self.config.neuron.upload_steps == 0:
                self.upload(archive=False)
            if self.local_progress.inner_step == LAST_STEP:
                self.all_reduce_end()
                self.should_exit = True
                break

    def inner_optimizer_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner_optimizer.step()
        self.inner_optimizer.zero_grad(set_to_none=True)
        self.local_progress.inner_step += 1
        self.running_loss, self.batch_count, self.local_progress.samples_accumulated = 0.0, 0, 0

    def all_reduce_end(self) -> None:
        self.training_loop.run_until_complete(self.all_reduce_local())

    async def all_reduce_local(self) -> None:
        self.pause_training()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.inner_optimizer_step()
        self.local_progress.inner_step = 0
        self.local_progress.epoch += 1
        self.upload(archive=True)
        self.resume_training()

    def upload(self, archive: bool) -> None:
        if self.current_upload_future is not None:
            self.current_upload_future.result()
        epoch = self.local_progress.epoch
        if SHAPE == "2025-05":
            self.start_background_upload(epoch)
        elif SHAPE == "unknown":
            self.start_background_upload(epoch, shard=0)
        else:
            self.start_background_upload(epoch, archive=archive)

    if SHAPE == "2025-05":

        def start_background_upload(self, epoch: int) -> None:
            self._start_upload(epoch, False)

    elif SHAPE == "unknown":

        def start_background_upload(self, epoch: int, *, shard: int) -> None:
            self._start_upload(epoch, False)

    else:

        def start_background_upload(self, epoch: int, archive: bool = False) -> None:
            self._start_upload(epoch, archive)

    def _start_upload(self, epoch: int, archive: bool) -> None:
        self.say(f"Saving model state locally for epoch {epoch}")
        state = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        # Upstream's upload thread reads both while training continues, so what it publishes, and under which tag,
        # depends on the machine. The tests compare runs: fix both here.
        state = {name: tensor.clone() for name, tensor in state.items()}
        self.upload_tag = f"5.{epoch}.{self.local_progress.inner_step}"
        self.current_upload_future = self.upload_executor.submit(
            self.upload_model, epoch, state, archive
        )

    def upload_model(self, epoch: int, full_state: Any = None, archive: bool = False) -> bool:
        if not self.master:
            return True
        torch.save(full_state, "gradients.pt")
        tag = self.upload_tag
        self.upload_process = subprocess.Popen(
            [
                sys.executable,
                str(WORKER),
                "bucket",
                "account",
                "key-that-leaks",
                "secret-that-leaks",
                tag,
                str(archive),
            ]
        )
        while self.upload_process.poll() is None:
            time.sleep(0.01)
        self.say(f"Successfully pushed new model state with tag {tag} to bucket: bucket")
        return True


if __name__ == "__main__":
    miner = Miner()
    miner.run()
    if miner.current_upload_future is not None:
        miner.current_upload_future.result()
    if miner.world_size > 1:
        dist.destroy_process_group()
        # FSDP keeps its gloo group, whose threads release the last tensors a little after the collective. For that
        # they take the interpreter's lock; one that comes when the interpreter has ended aborts the process.
        time.sleep(0.5)
