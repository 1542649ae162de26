"""The report of a rank on a GPU, as gathered by `guard.diagnose`."""

from __future__ import annotations

from typing import Any

GIB = 1024**3


def report(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "local_rank": rank,
        "world_size": 4,
        "host": "node",
        "torch_version": "2.5.1",
        "cuda_version": "12.4",
        "driver_version": "550.1",
        "cuda_available": True,
        "gpu_count": 4,
        "cuda_device": rank,
        "uuid": f"GPU-{rank}",
        "device_name": "NVIDIA A100-SXM4-80GB",
        "model_device": f"cuda:{rank}",
        "mesh_device": "cuda",
        "offload": False,
        "shards": {f"cuda:{rank}": [10**9, 2 * GIB]},
        "shard_bytes": 2 * GIB,
        "shard_params": 10**9,
        "dtype": "bfloat16",
        "shard_devices": f"cuda:{rank}",
        "meta_params": 0,
        "total_bytes": 80 * GIB,
        "allocated_bytes": 18 * GIB,
        "reserved_bytes": 20 * GIB,
        "device_used_bytes": 21 * GIB,
        "batch_size": 2,
        "effective_batch_size": 512,
        "accumulation_steps": 256,
        "visible_devices": None,
        **changes,
    }
