"""Replaces base/neuron.py: wallet, chain and storage of a registered miner without a GPU."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from miner_guard.validators import states
from tests.truth.miner import chain, world

miner: Any = None
"""The miner of this process."""


class BaseNeuron:
    """The attributes of the real class that the miner needs for uploads and steps."""

    neuron_type = "BaseNeuron"

    def __init__(self, config: Any = None) -> None:
        global miner
        miner = self
        sys.modules["__main__"].time = _Quick()  # type: ignore[attr-defined]
        self.config = _config()
        self.logger = chain.logging
        self.device = "cpu"
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.master = self.local_rank == 0
        dist.init_process_group("gloo")
        self.gloo_group = dist.new_group(backend="gloo")
        atexit.register(_leave)
        self.wallet = SimpleNamespace(hotkey=SimpleNamespace(ss58_address=chain.HOTKEY))
        self.subtensor, self.metagraph = chain.Subtensor(), chain.Metagraph()
        self.uid, self.master_uid = states.UID, 0
        self.output_dir = os.path.join(os.getcwd(), states.BUCKET)
        os.makedirs(self.output_dir, exist_ok=True)
        self.step = 0
        self.allreduce_timeout, self.upload_state_duration = 840, 1800
        self.all_reduce_success_status, self.should_all_reduce = True, False
        self.retry_limit, self.retry_delay = 1, 1
        self.reload_state_event = threading.Event()
        self.current_block = states.BLOCK
        self._storage()

    def _storage(self) -> None:
        import boto3

        keys = SimpleNamespace(access_key_id=states.READ_KEY, secret_access_key=states.READ_SECRET)
        self.config.r2 = SimpleNamespace(
            bucket_name=states.BUCKET, account_id=states.ACCOUNT, read=keys, write=keys
        )
        self.session = boto3.session.Session()
        where = f"https://{states.ACCOUNT}.r2.cloudflarestorage.com"
        client = self.session.client(
            "s3",
            endpoint_url=where,
            aws_access_key_id=states.READ_KEY,
            aws_secret_access_key=states.READ_SECRET,
            region_name="us-east-1",
        )
        self.r2 = {"local": client, "write": client, "global": client}

    @property
    def block(self) -> int:
        self.current_block = self.subtensor.get_current_block()
        return self.current_block

    def set_current_block_across_ranks(self) -> None:
        block = torch.tensor([self.current_block if self.master else 0])
        dist.broadcast(block, src=0, group=self.gloo_group)
        self.current_block = int(block.item())

    def sync(self) -> None:
        """The metagraph never changes."""

    def print_memory_usage(self) -> str:
        return ""


class _Quick:
    """Replaces `time` in the miner's script: a sleep takes a fiftieth of its time. Once the miner
    is stopping, background threads exit at their next sleep, because some versions have one that
    never ends."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        if getattr(miner, "should_exit", False) and threading.current_thread().name.startswith(
            "Thread-"
        ):
            raise SystemExit
        time.sleep(seconds / 50)


def _config() -> Any:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    neuron = SimpleNamespace(
        global_model_name=states.MODEL,
        local_model_name=f"someone/{states.BUCKET}",
        global_tokenizer_name="tokenizer",
        run_id="run",
        device="cpu",
        dont_wandb_log=True,
        wandb_project="distributed_training",
        local_batch_size_train=2,
        local_batch_size_train_effective=2 * world.MICRO_BATCHES * ranks,
        upload_steps=world.UPLOAD_STEPS,
        target_chunk=64,
        topk_compression=32,
        use_dct=False,
        quantization_bins=256,
        quantization_range=6,
        momentum_decay=0.999,
        min_group_size=1,
        influxdb_url="",
        influxdb_token="",
        influxdb_org="",
        influxdb_bucket="",
    )
    blacklist = SimpleNamespace(force_validator_permit=True, allow_non_registered=False)
    axon = SimpleNamespace(port=8091, ip="127.0.0.1", external_ip=None, external_port=None)
    return SimpleNamespace(
        neuron=neuron,
        blacklist=blacklist,
        axon=axon,
        netuid=38,
        subtensor=SimpleNamespace(chain_endpoint="local"),
        global_model_name=states.MODEL,
    )


def _without_gpu() -> None:
    barrier, cuda = dist.barrier, torch.cuda

    def on_cpu(group: Any = None, **_: Any) -> Any:
        return barrier(group=group)

    setattr(dist, "barrier", on_cpu)  # noqa: B010 - mypy takes no assignment to a module
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *_: None)


def _leave() -> None:
    """FSDP's gloo group releases its last tensors shortly after the collective; an interpreter that
    exits before then aborts."""
    dist.destroy_process_group()
    time.sleep(0.5)


# Some versions choose their GPU before they call `BaseNeuron.__init__`.
_without_gpu()
