from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from distributed_training import __run__
from distributed_training.base.miner import BaseMinerNeuron
from distributed_training.data.dataset import DatasetLoader
from distributed_training.utils.misc import init_dht
from distributed_training.utils.progress_tracker import get_progress
from distributed_training.utils.state_loader import load_state_from_peer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

WORKER = os.path.abspath(__file__).replace(
    "neurons/miner.py", "distributed_training/utils/upload_worker.py"
)


class Miner(BaseMinerNeuron):
    def __init__(self, config: Any = None) -> None:
        super(Miner, self).__init__(config=config)  # noqa: UP008 - as upstream writes it
        init_dht(self)
        self.training_active = threading.Event()
        self.training_active.set()
        self.stop_event = threading.Event()
        self.training_loop = asyncio.new_event_loop()
        self.upload_executor = ThreadPoolExecutor(1, thread_name_prefix="model_upload")
        self.current_upload_future: Future[Any] | None = None
        self.upload_process: subprocess.Popen[bytes] | None = None
        epoch = get_progress(self, "global")[0]
        self.global_progress = SimpleNamespace(epoch=epoch)
        self.local_progress = SimpleNamespace(epoch=epoch, inner_step=0, loss=0.0)
        load_state_from_peer(self, self.uid, epoch)
        self.error_feedback = {
            name: torch.zeros_like(tensor) for name, tensor in self._whole().items()
        }

    def _whole(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)

    async def fetch_training_data(self, block: int) -> Any:
        pages = await DatasetLoader.next_pages(offset=block)
        return await DatasetLoader.create(pages_info=pages)

    def _process_training_batch(self, dataset: Any) -> None:
        every = self.config.neuron.local_batch_size_train_effective // (2 * self.world_size)
        for number, (tokens, _) in enumerate(dataset, 1):
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.local_progress.loss = loss.item()
            if number % every:
                continue
            self.logger.info(f"Inner Step: {self.local_progress.inner_step}")
            self.inner_optimizer_step()
            if self.local_progress.inner_step % self.config.neuron.upload_steps == 0:
                self.start_background_upload(epoch=self.global_progress.epoch)

    def inner_optimizer_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner_optimizer.step()
        self.inner_optimizer.zero_grad(set_to_none=True)
        self.local_progress.inner_step += 1

    def prepare_gradient_dict(self, quantize: bool = False) -> Any:
        whole, gradient = self._whole(), {}
        if not self.master:
            return gradient, {}, {}
        offloaded = [p for group in self.outer_optimizer.param_groups for p in group["params"]]
        for (name, tensor), outer in zip(whole.items(), offloaded, strict=True):
            feedback = self.error_feedback[name]
            feedback.add_(outer.data - tensor, alpha=0.7)
            chunks = feedback.reshape(-1, 64, *feedback.shape[1:])
            indices = chunks.abs().topk(min(32, chunks.shape[-1]), dim=-1).indices
            gradient[f"{name}idxs"] = indices.to(torch.int16)
            gradient[f"{name}vals"] = chunks.gather(-1, indices)
            chunks.scatter_(-1, indices, 0.0)
        progress = self.local_progress
        gradient["metadata"] = {"inner_step": progress.inner_step, "outer_step": progress.epoch}
        return gradient, {}, {}

    def start_background_upload(self, epoch: int, archive: bool = False) -> None:
        self.logger.info(f"Saving model state locally for epoch {epoch}")
        gradient_state, _, _ = self.prepare_gradient_dict(quantize=False)
        dist.barrier(device_ids=[self.local_rank])
        self.current_upload_future = self.upload_executor.submit(
            self.upload_model, epoch, {}, {}, gradient_state, {}, 1e-3, archive
        )

    def upload_model(
        self,
        epoch: int,
        full_state: Any = None,
        optim_sd: Any = None,
        gradient_state: Any = None,
        scheduler_state_dict: Any = None,
        inner_optimizer_lr: Any = None,
        archive: bool = False,
    ) -> bool:
        if not self.master:
            return True
        torch.save(gradient_state, os.path.join(self.output_dir, "gradients.pt"))
        self.model.config.save_pretrained(self.output_dir)
        self.model.config.block_list = []
        r2, progress = self.config.r2, self.local_progress
        tag = f"{__run__}.{progress.epoch}.{progress.inner_step}"
        keys = [r2.account_id, r2.write.access_key_id, r2.write.secret_access_key]
        self.upload_process = subprocess.Popen(
            ["python", WORKER, r2.bucket_name, *keys, tag, str(archive)]
        )
        while self.upload_process.poll() is None:
            time.sleep(5)
        metadata = {
            "run": int(__run__),
            "outer_step": progress.epoch,
            "inner_step": progress.inner_step,
            "peer_id": self.dht.peer_id.to_base58(),
        }
        self.r2["write"].put_object(
            Bucket=r2.bucket_name, Key="metadata.json", Body=json.dumps(metadata).encode()
        )
        self.logger.info(f"Successfully pushed new model state with tag {tag}")
        return True


if __name__ == "__main__":
    Miner().run()
